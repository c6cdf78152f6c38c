// The optimizer side: questions about lists of tensors, and unscaling.
#pragma once

#include <ATen/Parallel.h>

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

// Whether operators do with it what they do with a plain tensor, and autograd records none of them.
bool is_ordinary(const Tensor& tensor) {
  return is_plain(tensor) && !tensor.is_inference() && !tensor.is_neg() &&
      !tensor._is_zerotensor();
}

// unscale(grads, found, inverse): multiply gradients by the 0-dim tensor `inverse`, in place, and
// set `found`, which is 0, to 1 if an inf or NaN was met; whether it was.
// None: nothing was done, one of them is unusual or not in host memory.
PyObject* unscale(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(
      count == 3 && THPVariable_Check(args[1]) && THPVariable_Check(args[2]),
      "unscale(grads, found: Tensor, inverse: Tensor)");
  const Items items(args[0]);
  if (c10::impl::TorchDispatchModeTLS::any_modes_set()) Py_RETURN_NONE;
  std::vector<Tensor> grads;
  grads.reserve(items.size());
  for (Py_ssize_t i = 0; i < items.size(); ++i) {
    const Tensor& grad = items.tensor(i);
    if (!grad.is_cpu() || !is_ordinary(grad) || grad.requires_grad()) Py_RETURN_NONE;
    if (grad.is_complex()) Py_RETURN_NONE;
    grads.push_back(grad);
  }
  if (grads.empty()) Py_RETURN_FALSE;
  Tensor found = THPVariable_Unpack(args[1]);
  {
    pybind11::gil_scoped_release no_gil;
    at::NoGradGuard no_grad;
    at::_amp_foreach_non_finite_check_and_unscale_(grads, found, THPVariable_Unpack(args[2]));
  }
  return PyBool_FromLong(*found.const_data_ptr<float>() != 0);
  END_HANDLE_TH_ERRORS
}

}  // namespace
