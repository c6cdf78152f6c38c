// The node that casts weights, FP32 in, half copies out; and their places in modules' tables.
#pragma once

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "copies.h"

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr c10::DispatchKeySet kWrappers({
    c10::DispatchKey::Python,
    c10::DispatchKey::Functionalize,
    c10::DispatchKey::Batched,
    c10::DispatchKey::FuncTorchBatched,
    c10::DispatchKey::FuncTorchGradWrapper,
});

bool is_plain(const Tensor& grad) {
  return grad.defined() && grad.layout() == at::kStrided && !grad.key_set().has_any(kWrappers);
}

bool is_traced() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Tracer) ||
      c10::impl::TorchDispatchModeTLS::get_mode(c10::impl::TorchDispatchModeKey::PROXY).has_value();
}

// FP32 weights in, half copies out; a missing gradient is passed on as missing.
struct CastTogether : public torch::autograd::Function<CastTogether> {
  static constexpr bool is_traceable = true;  // by compiled autograd

  // Autograd's own way to make the node; `in_graph` has a faster one.
  static variable_list forward(AutogradContext* ctx, at::TensorList weights, int64_t dtype) {
    ctx->set_materialize_grads(false);
    return copies_of(weights, static_cast<ScalarType>(dtype));
  }

  static variable_list backward(AutogradContext*, variable_list grads) {
    variable_list given, widened;
    for (const Tensor& grad : grads) {
      if (grad.defined()) given.push_back(grad);
    }
    if (!at::GradMode::is_enabled() && !is_traced() &&
        std::all_of(given.begin(), given.end(), is_plain)) {
      given = copies_of(given, at::kFloat);
    } else {
      for (Tensor& grad : given) grad = grad.to(at::kFloat);
    }
    auto next = given.begin();
    for (const Tensor& grad : grads) {
      widened.push_back(grad.defined() ? std::move(*next++) : Tensor());
    }
    widened.push_back(Tensor());  // for the argument of `forward` that is no tensor
    return widened;
  }
};

using CastNode = torch::autograd::CppNode<CastTogether>;
using EdgeTarget = decltype(torch::autograd::Edge::function);

constexpr uint64_t kFirst = uint64_t{1} << 62;  // as in torch_private/probes.py

// Has the history of half copies begin at one new node, which leads back to their weights.
template <typename Node>
void lead_back(variable_list halves, const variable_list& weights) {
  auto node = c10::make_intrusive<Node>();
  node->ctx_.set_materialize_grads(false);
  node->is_variable_input_.assign(weights.size(), true);
  node->set_ctx_grad_fn(node);
  node->set_next_edges(torch::autograd::collect_next_edges(weights));
  torch::autograd::set_history(halves, node);
}

// Half copies of weights, each with an edge to the node that leads back to them; `apart`: to one of
// its own, which runs when it is ready.
// Where this torch keeps nodes as this code knows it, the node is made here: `Function::apply`
// keeps sizes of each tensor for the zeros of missing gradients, which are not wanted.
// Both are parameters, so that a torch which keeps nodes otherwise does not compile the first part.
template <typename Target, typename Node>
variable_list in_graph(const variable_list& weights, ScalarType dtype, bool apart) {
  variable_list halves;
  if constexpr (std::is_same_v<Target, c10::intrusive_ptr<torch::autograd::Node>>) {
    halves = copies_of(weights, dtype);
    if (!apart) lead_back<Node>(halves, weights);
    for (size_t i = 0; apart && i < weights.size(); ++i) lead_back<Node>({halves[i]}, {weights[i]});
  } else if (!apart) {
    halves = CastTogether::apply(at::TensorList(weights), static_cast<int64_t>(dtype));
  } else {
    for (const Tensor& weight : weights) halves.push_back(weight.to(dtype));
  }
  for (size_t i = 0; apart && i < halves.size(); ++i) halves[i].grad_fn()->set_sequence_nr(kFirst);
  return halves;
}

// Half copies of the tensors of a list, in the graph.
std::vector<Tensor> cast_in_graph(PyObject* list, ScalarType dtype, bool apart = false) {
  const std::vector<Tensor> weights = tensors_of(list);
  pybind11::gil_scoped_release no_gil;
  return in_graph<EdgeTarget, CastNode>(weights, dtype, apart);
}

// The same outside the graph.
std::vector<Tensor> cast_outside_graph(PyObject* list, ScalarType dtype) {
  const std::vector<Tensor> tensors = tensors_of(list);
  pybind11::gil_scoped_release no_gil;
  std::vector<Tensor> made = copies_of(tensors, dtype);
  if (!at::GradMode::is_enabled()) {
    for (size_t i = 0; i < made.size(); ++i) want_as(tensors[i], made[i]);
  }
  return made;
}

ScalarType scalar_type_of(PyObject* dtype) {
  return reinterpret_cast<THPDtype*>(dtype)->scalar_type;
}

// cast_together(weights, dtype): half copies of a list of FP32 weights, in the graph.
// In Python: `cast_in_graph` of `casting/batched_casts.py`.
PyObject* cast_together(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(
      count == 2 && PyList_Check(args[0]) && THPDtype_Check(args[1]),
      "cast_together(weights: list, dtype: torch.dtype)");
  return list_of(cast_in_graph(args[0], scalar_type_of(args[1])));
  END_HANDLE_TH_ERRORS
}

// cast_apart(weights, dtype): as `cast_together`, by a node for each weight.
// In Python: `cast_apart` of `casting/batched_casts.py`.
PyObject* cast_apart(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(
      count == 2 && PyList_Check(args[0]) && THPDtype_Check(args[1]),
      "cast_apart(weights: list, dtype: torch.dtype)");
  return list_of(cast_in_graph(args[0], scalar_type_of(args[1]), /*apart=*/true));
  END_HANDLE_TH_ERRORS
}

// cast_into(copies, weights, dtype, in_graph): as `cast_together` or `copies`; each half copy is
// entered under its weight's id, with the version that it was made from.
// In Python: `cast_into` of `casting/batched_casts.py`.
PyObject* cast_into(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(
      count == 4 && PyDict_CheckExact(args[0]) && PyList_CheckExact(args[1]) &&
          THPDtype_Check(args[2]) && PyBool_Check(args[3]),
      "cast_into(copies: dict, weights: list, dtype: torch.dtype, in_graph: bool)");
  PyObject* weights = args[1];
  const ScalarType dtype = scalar_type_of(args[2]);
  const Py_ssize_t size = PyList_GET_SIZE(weights);
  std::vector<int64_t> versions;
  for (Py_ssize_t i = 0; i < size; ++i) {  // before the cast: another thread may write meanwhile
    versions.push_back(THPVariable_Unpack(PyList_GET_ITEM(weights, i))._version());
  }
  auto halves =
      args[3] == Py_True ? cast_in_graph(weights, dtype) : cast_outside_graph(weights, dtype);
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (!at::GradMode::is_enabled()) halves[i].set_requires_grad(true);
    THPObjectPtr id(PyLong_FromVoidPtr(PyList_GET_ITEM(weights, i)));
    THPObjectPtr half(THPVariable_Wrap(std::move(halves[i])));
    THPObjectPtr version(PyLong_FromLongLong(versions[i]));
    if (!id || !half || !version) return nullptr;
    THPObjectPtr entry(PyTuple_Pack(2, half.get(), version.get()));
    if (!entry || PyDict_SetItem(args[0], id, entry) != 0) return nullptr;
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// copies(tensors, dtype): as the node's copies, outside the graph.
// In Python: `_outside_graph` of `casting/batched_casts.py`.
PyObject* copies(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(
      count == 2 && PyList_Check(args[0]) && THPDtype_Check(args[1]),
      "copies(tensors: list, dtype: torch.dtype)");
  return list_of(cast_outside_graph(args[0], scalar_type_of(args[1])));
  END_HANDLE_TH_ERRORS
}

bool has_hooks(PyObject* tensor) {
  const auto* variable = reinterpret_cast<THPVariable*>(tensor);
  const auto holds = [](PyObject* hooks) {
    const int answer = hooks == nullptr ? 0 : PyObject_IsTrue(hooks);
    if (answer < 0) throw python_error();
    return answer == 1;
  };
  return holds(variable->backward_hooks) || holds(variable->post_accumulate_grad_hooks);
}

// are_alike(weight, bucket): whether all weights of a list may be cast in one node with `weight`.
// In Python: `are_alike` of `casting/batched_casts.py`.
PyObject* are_alike(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(
      count == 2 && THPVariable_Check(args[0]) && PyList_Check(args[1]),
      "are_alike(weight: Tensor, bucket: list)");
  const Tensor& weight = THPVariable_Unpack(args[0]);
  const bool wanted = weight.requires_grad();
  if (reinterpret_cast<PyObject*>(Py_TYPE(args[0])) != ParameterClass ||
      weight.scalar_type() != at::kFloat || !weight.is_leaf() ||
      weight.layout() != at::kStrided || has_hooks(args[0])) {
    Py_RETURN_FALSE;
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[1]); ++i) {
    PyObject* one = PyList_GET_ITEM(args[1], i);
    if (!THPVariable_Check(one) || THPVariable_Unpack(one).requires_grad() != wanted ||
        has_hooks(one)) {
      Py_RETURN_FALSE;
    }
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

PyObject* observers = nullptr;

// watch(list): the list of the observers of casts.
PyObject* watch(PyObject*, PyObject* list) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(PyList_CheckExact(list), "watch(observers: list)");
  Py_INCREF(list);
  Py_XSETREF(observers, list);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

bool are_lists(PyObject* const* args, Py_ssize_t count) {
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!PyList_CheckExact(args[i]) || PyList_GET_SIZE(args[i]) != PyList_GET_SIZE(args[0])) {
      return false;
    }
  }
  return true;
}

// The item of a list at the index that a Python number gives; a borrowed reference.
PyObject* chosen(PyObject* list, PyObject* number) {
  const Py_ssize_t index = PyLong_AsSsize_t(number);
  TORCH_CHECK_INDEX(index >= 0 && index < PyList_GET_SIZE(list), "no such index");
  return PyList_GET_ITEM(list, index);
}

// exchange_entries(tables, names, sources, new, old): entry i becomes new[sources[i]]; with `old`
// only if all are old[sources[i]], which is returned.
// In Python: `exchange` of `models/lent_places.py`.
PyObject* exchange_entries(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(
      count == 5 && are_lists(args, 3) && PyList_CheckExact(args[3]) &&
          (args[4] == Py_None || PyList_CheckExact(args[4])),
      "exchange_entries(tables: list, names: list, sources: list, new: list, old: list | None)");
  const Py_ssize_t size = PyList_GET_SIZE(args[0]);
  for (Py_ssize_t i = 0; i < size && args[4] != Py_None; ++i) {
    PyObject* value =
        PyDict_GetItemWithError(PyList_GET_ITEM(args[0], i), PyList_GET_ITEM(args[1], i));
    if (value == nullptr && PyErr_Occurred()) return nullptr;
    if (value != chosen(args[4], PyList_GET_ITEM(args[2], i))) Py_RETURN_FALSE;
  }
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* value = chosen(args[3], PyList_GET_ITEM(args[2], i));
    if (PyDict_SetItem(PyList_GET_ITEM(args[0], i), PyList_GET_ITEM(args[1], i), value) != 0) {
      return nullptr;
    }
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

}  // namespace
