// The native part: what ampatch/native/__init__.py says of it.
#include <Python.h>
#include <ATen/ATen.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>

namespace {

using at::Tensor;
using torch::autograd::variable_list;

// Copies of another dtype, by one foreach call; autograd does not record it.
variable_list copies(at::TensorList from, at::ScalarType dtype) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  variable_list made;
  made.reserve(from.size());
  for (const auto& tensor : from) made.push_back(at::empty_like(tensor, tensor.options().dtype(dtype)));
  at::_foreach_copy_(made, from);
  return made;
}

struct CastTogether : public torch::autograd::Node {
  variable_list apply(variable_list&& grads) override { return copies(grads, at::kFloat); }
};

// cast_together(weights: list[Tensor], dtype) -> list[Tensor]
PyObject* cast_together(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 2 || !PyList_Check(arguments[0]) || !THPDtype_Check(arguments[1])) {
    PyErr_SetString(PyExc_TypeError, "cast_together: expected a list of tensors and a dtype.");
    return nullptr;
  }
  variable_list weights;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(arguments[0]); ++i) {
    weights.push_back(THPVariable_Unpack(PyList_GET_ITEM(arguments[0], i)));
  }
  auto half = copies(weights, reinterpret_cast<THPDtype*>(arguments[1])->scalar_type);
  auto node = c10::make_intrusive<CastTogether>();
  node->set_next_edges(torch::autograd::collect_next_edges(weights));
  torch::autograd::set_history(half, node);
  PyObject* result = PyList_New(static_cast<Py_ssize_t>(half.size()));
  if (result == nullptr) return nullptr;
  for (size_t i = 0; i < half.size(); ++i) {
    PyList_SET_ITEM(result, static_cast<Py_ssize_t>(i), THPVariable_Wrap(half[i]));
  }
  return result;
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"cast_together", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(cast_together)),
     METH_FASTCALL, "Half copies of weights, from one node of the graph."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_ampatch_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__ampatch_native() { return PyModule_Create(&definition); }
