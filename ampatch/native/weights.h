// The node that casts FP32 weights to half copies, and the slots of weights in modules.
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

// Whether a gradient is strided and no wrapper of another tensor.
bool is_plain(const Tensor& grad) {
  return grad.defined() && grad.layout() == at::kStrided && !grad.key_set().has_any(kWrappers);
}

// Whether `torch.jit.trace` or `make_fx` traces this thread.
bool is_jit_or_fx_traced() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Tracer) ||
      c10::impl::TorchDispatchModeTLS::get_mode(c10::impl::TorchDispatchModeKey::PROXY).has_value();
}

// Casts FP32 weights to half copies.  A missing gradient is passed on as missing.
struct CastTogether : public torch::autograd::Function<CastTogether> {
  static constexpr bool is_traceable = true;  // compiled autograd may trace the node

  // Called by Function::apply.  `cast_in_graph` builds the same node without it, which is faster.
  static variable_list forward(AutogradContext* ctx, at::TensorList weights, int64_t dtype) {
    ctx->set_materialize_grads(false);
    return copies_of(weights, static_cast<ScalarType>(dtype));
  }

  static variable_list backward(AutogradContext*, variable_list grads) {
    variable_list present, widened;
    for (const Tensor& grad : grads) {
      if (grad.defined()) present.push_back(grad);
    }
    if (!at::GradMode::is_enabled() && !is_jit_or_fx_traced() &&
        std::all_of(present.begin(), present.end(), is_plain)) {
      present = copies_of(present, at::kFloat);
    } else {
      for (Tensor& grad : present) grad = grad.to(at::kFloat);
    }
    auto next = present.begin();
    for (const Tensor& grad : grads) {
      widened.push_back(grad.defined() ? std::move(*next++) : Tensor());
    }
    widened.push_back(Tensor());  // the gradient of the argument `dtype` of `forward`
    return widened;
  }
};

using CastNode = torch::autograd::CppNode<CastTogether>;
using EdgeTarget = decltype(torch::autograd::Edge::function);

constexpr uint64_t kHighSequenceNr = uint64_t{1} << 62;  // as in torch_private/probes.py

// Makes one new node the `grad_fn` of half copies; its edges lead to their weights.
template <typename Node>
void set_cast_node(variable_list half_copies, const variable_list& weights) {
  auto node = c10::make_intrusive<Node>();
  node->ctx_.set_materialize_grads(false);
  node->is_variable_input_.assign(weights.size(), true);
  node->set_ctx_grad_fn(node);
  node->set_next_edges(torch::autograd::collect_next_edges(weights));
  torch::autograd::set_history(half_copies, node);
}

// Half copies of weights, made by one node for all weights, or, with `own_nodes`, by one for each.
// Each node gets a high sequence number, so it runs as soon as it is ready.  If this torch holds
// nodes by intrusive_ptr, the node is built here: Function::apply would also record output sizes, to
// materialize missing gradients.  `Target` and `Node` are template parameters so that the first
// branch is compiled only where it is taken: with another torch it is an error.
template <typename Target, typename Node>
variable_list cast_in_graph(const variable_list& weights, ScalarType dtype, bool own_nodes) {
  variable_list half_copies;
  if constexpr (std::is_same_v<Target, c10::intrusive_ptr<torch::autograd::Node>>) {
    half_copies = copies_of(weights, dtype);
    if (!own_nodes) set_cast_node<Node>(half_copies, weights);
    for (size_t i = 0; own_nodes && i < weights.size(); ++i) {
      set_cast_node<Node>({half_copies[i]}, {weights[i]});
    }
  } else if (!own_nodes) {
    half_copies = CastTogether::apply(at::TensorList(weights), static_cast<int64_t>(dtype));
  } else {
    for (const Tensor& weight : weights) half_copies.push_back(weight.to(dtype));
  }
  const size_t nodes = own_nodes ? half_copies.size() : 1;
  for (size_t i = 0; i < nodes; ++i) {
    if (const auto node = half_copies[i].grad_fn()) node->set_sequence_nr(kHighSequenceNr);
  }
  return half_copies;
}

// cast_weights(weights, dtype, own_nodes): returns half copies of a list of FP32 weights.
// In Python: `_cast_weights_in_python` of `casting/half_copies.py`.
PyObject* cast_weights(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(
      nargs == 3 && PyList_Check(args[0]) && THPDtype_Check(args[1]) && PyBool_Check(args[2]),
      "cast_weights(weights: list, dtype: torch.dtype, own_nodes: bool)");
  const ScalarType dtype = reinterpret_cast<THPDtype*>(args[1])->scalar_type;
  const variable_list weights = tensors_of(args[0]);
  const bool is_enabled = at::GradMode::is_enabled();
  const bool in_graph = is_enabled &&
      std::any_of(weights.begin(), weights.end(), [](const Tensor& weight) { return weight.requires_grad(); });
  variable_list half_copies;
  {
    pybind11::gil_scoped_release no_gil;
    half_copies = in_graph ? cast_in_graph<EdgeTarget, CastNode>(weights, dtype, args[2] == Py_True)
                      : copies_of(weights, dtype);
    for (size_t i = 0; !is_enabled && i < half_copies.size(); ++i) {
      require_grad_as(weights[i], half_copies[i]);
    }
  }
  return list_of(std::move(half_copies));
  END_HANDLE_TH_ERRORS
}

bool has_hooks(PyObject* tensor) {
  const auto* variable = reinterpret_cast<THPVariable*>(tensor);
  const auto is_filled = [](PyObject* hooks) {
    const int answer = hooks == nullptr ? 0 : PyObject_IsTrue(hooks);
    if (answer < 0) throw python_error();
    return answer == 1;
  };
  return is_filled(variable->backward_hooks) || is_filled(variable->post_accumulate_grad_hooks);
}

// all_may_share_node(weight, bucket): returns whether all weights of a list may be cast in one node
// with `weight`.
// In Python: `all_may_share_node` of `casting/half_copies.py`.
PyObject* all_may_share_node(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(
      nargs == 2 && THPVariable_Check(args[0]) && PyList_Check(args[1]),
      "all_may_share_node(weight: Tensor, bucket: list)");
  const Tensor& weight = THPVariable_Unpack(args[0]);
  const bool requires_grad = weight.requires_grad();
  if (reinterpret_cast<PyObject*>(Py_TYPE(args[0])) != ParameterClass ||
      weight.scalar_type() != at::kFloat || !weight.is_leaf() ||
      weight.layout() != at::kStrided || has_hooks(args[0])) {
    Py_RETURN_FALSE;
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[1]); ++i) {
    PyObject* other = PyList_GET_ITEM(args[1], i);
    if (!THPVariable_Check(other) || THPVariable_Unpack(other).requires_grad() != requires_grad ||
        has_hooks(other)) {
      Py_RETURN_FALSE;
    }
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

PyObject* observers = nullptr;

// set_observers(list): sets the list of the observers of casts.
PyObject* set_observers(PyObject*, PyObject* list) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(PyList_CheckExact(list), "set_observers(observers: list)");
  Py_INCREF(list);
  Py_XSETREF(observers, list);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

bool are_lists_of_equal_size(PyObject* const* args, Py_ssize_t count) {
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!PyList_CheckExact(args[i]) || PyList_GET_SIZE(args[i]) != PyList_GET_SIZE(args[0])) {
      return false;
    }
  }
  return true;
}

// The item of a list at an index, a Python int; a borrowed reference.
PyObject* item_at(PyObject* list, PyObject* number) {
  const Py_ssize_t index = PyLong_AsSsize_t(number);
  TORCH_CHECK_INDEX(index >= 0 && index < PyList_GET_SIZE(list), "no such index");
  return PyList_GET_ITEM(list, index);
}

// set_entries(dicts, names, indices, values, expected): sets dicts[i][names[i]] to
// values[indices[i]].  With `expected`, sets nothing unless every entry is expected[indices[i]].
// Returns whether the entries were set.
// In Python: `set_entries` of `models/half_copy_slots.py`.
PyObject* set_entries(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(
      nargs == 5 && are_lists_of_equal_size(args, 3) && PyList_CheckExact(args[3]) &&
          (args[4] == Py_None || PyList_CheckExact(args[4])),
      "set_entries(dicts: list, names: list, indices: list, values: list, expected: list | None)");
  const Py_ssize_t size = PyList_GET_SIZE(args[0]);
  for (Py_ssize_t i = 0; i < size && args[4] != Py_None; ++i) {
    PyObject* value =
        PyDict_GetItemWithError(PyList_GET_ITEM(args[0], i), PyList_GET_ITEM(args[1], i));
    if (value == nullptr && PyErr_Occurred()) return nullptr;
    if (value != item_at(args[4], PyList_GET_ITEM(args[2], i))) Py_RETURN_FALSE;
  }
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* value = item_at(args[3], PyList_GET_ITEM(args[2], i));
    if (PyDict_SetItem(PyList_GET_ITEM(args[0], i), PyList_GET_ITEM(args[1], i), value) != 0) {
      return nullptr;
    }
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

}  // namespace
