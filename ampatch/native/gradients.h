// The optimizer side: questions about lists of tensors, and unscaling.
#pragma once

#include "weights.h"

namespace {

PyObject* grad_name = nullptr;

// The items of a list or tuple.
class Items {
 public:
  explicit Items(PyObject* sequence) : list_(PySequence_Fast(sequence, "expected a sequence")) {
    if (!list_) throw python_error();
  }
  Py_ssize_t size() const { return PySequence_Fast_GET_SIZE(list_.get()); }
  PyObject* operator[](Py_ssize_t place) const {
    return PySequence_Fast_GET_ITEM(list_.get(), place);
  }
  const Tensor& tensor(Py_ssize_t place) const {
    PyObject* item = (*this)[place];
    TORCH_CHECK_TYPE(THPVariable_Check(item), "expected tensors");
    return THPVariable_Unpack(item);
  }

 private:
  THPObjectPtr list_;
};

// The gradient that autograd has left, without a look at the attribute of a subclass.
const Tensor& raw_grad(const Tensor& tensor) { return tensor.unsafeGetTensorImpl()->grad(); }

void drop(const Tensor& tensor) {
  if (raw_grad(tensor).defined()) tensor.mutable_grad().reset();
}

// `.grad` of an item, None as undefined; a subclass is asked for its attribute.
THPObjectPtr grad_of(PyObject* item) {
  if (!THPVariable_CheckExact(item)) {
    THPObjectPtr grad(PyObject_GetAttr(item, grad_name));
    if (!grad) throw python_error();
    return grad;
  }
  const Tensor& grad = raw_grad(THPVariable_Unpack(item));
  return THPObjectPtr(grad.defined() ? THPVariable_Wrap(grad) : Py_NewRef(Py_None));
}

// with_grads(tensors): those that have a gradient.
PyObject* with_grads(PyObject*, PyObject* sequence) {
  HANDLE_TH_ERRORS
  const Items items(sequence);
  THPObjectPtr found(PyList_New(0));
  if (!found) return nullptr;
  for (Py_ssize_t i = 0; i < items.size(); ++i) {
    if (THPVariable_CheckExact(items[i])
            ? !raw_grad(THPVariable_Unpack(items[i])).defined()
            : grad_of(items[i]).get() == Py_None) {
      continue;
    }
    if (PyList_Append(found, items[i]) != 0) return nullptr;
  }
  return found.release();
  END_HANDLE_TH_ERRORS
}

// grads_of(tensors): the gradients of those that have one.
PyObject* grads_of(PyObject*, PyObject* sequence) {
  HANDLE_TH_ERRORS
  const Items items(sequence);
  THPObjectPtr found(PyList_New(0));
  if (!found) return nullptr;
  for (Py_ssize_t i = 0; i < items.size(); ++i) {
    THPObjectPtr grad = grad_of(items[i]);
    if (!grad || (grad.get() != Py_None && PyList_Append(found, grad.get()) != 0)) return nullptr;
  }
  return found.release();
  END_HANDLE_TH_ERRORS
}

// drop_grads(tensors): `tensor.grad = None` for each.
PyObject* drop_grads(PyObject*, PyObject* sequence) {
  HANDLE_TH_ERRORS
  const Items items(sequence);
  for (Py_ssize_t i = 0; i < items.size(); ++i) {
    if (THPVariable_CheckExact(items[i])) {
      drop(THPVariable_Unpack(items[i]));
    } else if (PyObject_SetAttr(items[i], grad_name, Py_None) != 0) {
      return nullptr;
    }
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Whether the kernel may write into it as it is: numbers in host memory that no graph records.
bool is_unscaled_here(const Tensor& grad) {
  return grad.is_cpu() && is_plain(grad) && !grad.is_complex() && !grad.is_inference() &&
      !grad.is_neg() && !grad._is_zerotensor() && !grad.requires_grad();
}

// unscale(grads, scale): divide gradients by the 0-dim tensor `scale`, in place; whether an inf or
// NaN was met.  None: nothing was done, since one of them is unusual or not in host memory.
PyObject* unscale(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(
      count == 2 && THPVariable_Check(args[1]), "unscale(grads: list, scale: Tensor)");
  const Items items(args[0]);
  const Tensor scale = THPVariable_Unpack(args[1]);
  if (c10::impl::TorchDispatchModeTLS::any_modes_set() || !scale.is_cpu()) Py_RETURN_NONE;
  std::vector<Tensor> grads;
  grads.reserve(items.size());
  for (Py_ssize_t i = 0; i < items.size(); ++i) {
    const Tensor& grad = items.tensor(i);
    if (!is_unscaled_here(grad)) Py_RETURN_NONE;
    grads.push_back(grad);
  }
  if (grads.empty()) Py_RETURN_FALSE;
  Tensor found;
  {
    pybind11::gil_scoped_release no_gil;
    at::NoGradGuard no_grad;
    found = at::zeros_like(scale);
    at::_amp_foreach_non_finite_check_and_unscale_(grads, found, scale.reciprocal());
  }
  return PyBool_FromLong(*found.const_data_ptr<float>() != 0);
  END_HANDLE_TH_ERRORS
}

}  // namespace
