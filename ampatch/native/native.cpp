// The native part of ampatch: what a training step does most often, without the price of Python.
//
// Every function here has a twin in Python that gives the same bits; it stands where the function
// is used.  A function that meets something unusual leaves it to its twin.  Only ATen's operators
// compute, so that one source serves every device.

#include <Python.h>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/Size.h>
#include <torch/csrc/utils/object_ptr.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using at::ScalarType;
using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr c10::DispatchKeySet kPlainCpu({
    c10::DispatchKey::CPU, c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::AutogradCPU,
    c10::DispatchKey::AutocastCPU});

// ---- Weights and lists ------------------------------------------------------------------------

// On the CPU a call of an operator costs as much as converting some thousand numbers.
constexpr int64_t kFewNumbers = 4096;

// Whether its numbers are in host memory.  Memory that was freed (`storage.resize_(0)`) is for ATen
// to refuse.
bool is_in_memory(const Tensor& tensor) {
  return tensor.key_set() == kPlainCpu && tensor.unsafeGetTensorImpl()->storage_initialized();
}

// Whether the numbers of a tensor may be read and written here, in the order of its memory.
bool is_small(const Tensor& tensor) {
  return is_in_memory(tensor) && tensor.numel() <= kFewNumbers &&
      tensor.is_non_overlapping_and_dense();
}

uint16_t bfloat16_nan = 0x7fc0;  // what ATen makes of any NaN here: its vector units have their own

// FP32 to bfloat16, to the nearest, ties to even: as c10::BFloat16.
void narrow(uint16_t* to, const uint32_t* from, int64_t size) {
  const uint16_t nan = bfloat16_nan;
  for (int64_t i = 0; i < size; ++i) {
    const uint32_t bits = from[i];
    const uint32_t half = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to[i] = (bits & 0x7fffffff) > 0x7f800000 ? nan : static_cast<uint16_t>(half);
  }
}

// The import may be within modes and transforms, which would make a tensor without numbers.
void learn_nan() {
  const c10::impl::ForceDispatchKeyGuard plain(
      c10::default_included_set, c10::default_excluded_set);
  const Tensor nan = at::full({16}, NAN, at::TensorOptions(at::kFloat)).to(at::kBFloat16);
  bfloat16_nan = *static_cast<const uint16_t*>(nan.const_data_ptr());
}

void widen(uint32_t* to, const uint16_t* from, int64_t size) {
  for (int64_t i = 0; i < size; ++i) to[i] = static_cast<uint32_t>(from[i]) << 16;
}

// A copy made here; undefined where ATen must make it.
Tensor small_copy(const Tensor& tensor, ScalarType dtype) {
  const ScalarType from = tensor.scalar_type();
  const bool narrows = from == at::kFloat && dtype == at::kBFloat16;
  if (!(narrows || (from == at::kBFloat16 && dtype == at::kFloat)) || !is_small(tensor)) return {};
  Tensor made = at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), dtype);
  if (narrows) {
    narrow(static_cast<uint16_t*>(made.mutable_data_ptr()),
           static_cast<const uint32_t*>(tensor.const_data_ptr()), tensor.numel());
  } else {
    widen(static_cast<uint32_t*>(made.mutable_data_ptr()),
          static_cast<const uint16_t*>(tensor.const_data_ptr()), tensor.numel());
  }
  return made;
}

// New tensors with these values in `dtype`, outside the graph.
std::vector<Tensor> copies_of(at::TensorList tensors, ScalarType dtype) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const bool may_be_here = !c10::impl::TorchDispatchModeTLS::any_modes_set();
  std::vector<Tensor> made, rest_made, rest;
  made.reserve(tensors.size());
  for (const Tensor& tensor : tensors) {
    made.push_back(may_be_here ? small_copy(tensor, dtype) : Tensor());
    if (made.back().defined()) continue;
    made.back() = at::empty_like(tensor, tensor.options().dtype(dtype));
    rest_made.push_back(made.back());
    rest.push_back(tensor);
  }
  if (!rest.empty()) at::_foreach_copy_(rest_made, rest);
  return made;
}

std::vector<Tensor> tensors_of(PyObject* list) {
  std::vector<Tensor> tensors;
  const Py_ssize_t size = PyList_GET_SIZE(list);
  tensors.reserve(size);
  for (Py_ssize_t i = 0; i < size; ++i) {
    tensors.push_back(THPVariable_Unpack(PyList_GET_ITEM(list, i)));
  }
  return tensors;
}

PyObject* list_of(std::vector<Tensor> tensors) {
  THPObjectPtr list(PyList_New(static_cast<Py_ssize_t>(tensors.size())));
  if (!list) return nullptr;
  for (size_t i = 0; i < tensors.size(); ++i) {
    PyObject* tensor = THPVariable_Wrap(std::move(tensors[i]));
    if (tensor == nullptr) return nullptr;
    PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), tensor);
  }
  return list.release();
}

// Whether all of a small tensor's FP32 numbers lie within (-limit, limit); NaN does not.
bool lies_within(const Tensor& tensor, float limit) {
  const float* numbers = tensor.const_data_ptr<float>();
  bool is_within = true;
  for (int64_t i = 0; i < tensor.numel(); ++i) is_within &= std::fabs(numbers[i]) < limit;
  return is_within;
}

// fitting_copy(tensor, dtype, limit): a small FP32 tensor in bfloat16, if its numbers lie within
// (-limit, limit).  None: one does not, or it is for ATen, autograd or a mode to make the copy.
PyObject* fitting_copy(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(
      count == 3 && THPVariable_Check(args[0]) && THPDtype_Check(args[1]) && PyFloat_Check(args[2]),
      "fitting_copy(tensor: Tensor, dtype: torch.dtype, limit: float)");
  const Tensor& tensor = THPVariable_Unpack(args[0]);
  const auto dtype = reinterpret_cast<THPDtype*>(args[1])->scalar_type;
  const bool is_recorded = (tensor.requires_grad() && at::GradMode::is_enabled()) ||
      tensor._fw_grad(/*level=*/0).defined();
  if (is_recorded || dtype != at::kBFloat16 || tensor.scalar_type() != at::kFloat ||
      c10::impl::TorchDispatchModeTLS::any_modes_set() || !is_small(tensor) ||
      !lies_within(tensor, static_cast<float>(PyFloat_AS_DOUBLE(args[2])))) {
    Py_RETURN_NONE;
  }
  return THPVariable_Wrap(small_copy(tensor, dtype));
  END_HANDLE_TH_ERRORS
}

// ---- The node that casts weights --------------------------------------------------------------

PyObject* note_missing = nullptr;  // called with a plan's number and the ids of weights

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

  // Autograd's own way to make the node; `with_node` is a faster one.
  static variable_list forward(
      AutogradContext* ctx, at::TensorList weights, int64_t dtype, int64_t plan,
      const std::vector<int64_t>& ids) {
    prepare(ctx, plan, ids);
    return copies_of(weights, static_cast<ScalarType>(dtype));
  }

  static void prepare(AutogradContext* ctx, int64_t plan, const std::vector<int64_t>& ids) {
    ctx->set_materialize_grads(false);
    if (plan < 0) return;
    ctx->saved_data["plan"] = plan;
    ctx->saved_data["ids"] = ids;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list widened;
    if (!at::GradMode::is_enabled() && !is_traced() &&
        std::all_of(grads.begin(), grads.end(), is_plain)) {
      widened = copies_of(grads, at::kFloat);
    } else {
      tell_missing(ctx, grads);
      for (const Tensor& grad : grads) {
        widened.push_back(grad.defined() ? grad.to(at::kFloat) : Tensor());
      }
    }
    widened.resize(widened.size() + 3);  // for the arguments of `forward` that are no tensors
    return widened;
  }

  static void tell_missing(AutogradContext* ctx, const variable_list& grads) {
    const auto plan = ctx->saved_data.find("plan");
    if (plan == ctx->saved_data.end()) return;
    const auto ids = ctx->saved_data.at("ids").toIntVector();
    pybind11::gil_scoped_acquire gil;
    THPObjectPtr missing(PyList_New(0));
    if (!missing) throw python_error();
    for (size_t i = 0; i < grads.size(); ++i) {
      if (grads[i].defined()) continue;
      THPObjectPtr id(PyLong_FromLongLong(ids[i]));
      if (!id || PyList_Append(missing, id) != 0) throw python_error();
    }
    if (PyList_GET_SIZE(missing.get()) == 0) return;
    THPObjectPtr done(PyObject_CallFunction(
        note_missing, "LO", static_cast<long long>(plan->second.toInt()), missing.get()));
    if (!done) throw python_error();
  }
};

using CastNode = torch::autograd::CppNode<CastTogether>;
using EdgeTarget = decltype(torch::autograd::Edge::function);

// Half copies of weights, each with an edge to the node that leads back to them.
// Where this torch keeps nodes as this code knows it, the node is made here: `Function::apply`
// keeps sizes of each tensor for the zeros of missing gradients, which are not wanted.
template <typename Target>
variable_list in_graph(
    const variable_list& weights, ScalarType dtype, int64_t plan, const std::vector<int64_t>& ids) {
  if constexpr (std::is_same_v<Target, c10::intrusive_ptr<torch::autograd::Node>>) {
    auto halves = copies_of(weights, dtype);
    auto node = c10::make_intrusive<CastNode>();
    CastTogether::prepare(&node->ctx_, plan, ids);
    node->is_variable_input_.assign(weights.size(), true);
    node->set_ctx_grad_fn(node);
    node->set_next_edges(torch::autograd::collect_next_edges(weights));
    torch::autograd::set_history(halves, node);
    return halves;
  } else {
    return CastTogether::apply(
        at::TensorList(weights), static_cast<int64_t>(dtype), plan, ids);
  }
}

// cast_together(weights, dtype, plan): half copies of a list of FP32 weights, in the graph.
// `plan` is the number that `note_missing` is called with, or -1.
PyObject* cast_together(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(
      count == 3 && PyList_Check(args[0]) && THPDtype_Check(args[1]) && PyLong_Check(args[2]),
      "cast_together(weights: list, dtype: torch.dtype, plan: int)");
  const std::vector<Tensor> weights = tensors_of(args[0]);
  const auto dtype = reinterpret_cast<THPDtype*>(args[1])->scalar_type;
  const int64_t plan = PyLong_AsLongLong(args[2]);
  std::vector<int64_t> ids;
  if (plan >= 0) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]); ++i) {
      ids.push_back(reinterpret_cast<int64_t>(PyList_GET_ITEM(args[0], i)));
    }
  }
  std::vector<Tensor> halves;
  {
    pybind11::gil_scoped_release no_gil;
    halves = in_graph<EdgeTarget>(weights, dtype, plan, ids);
  }
  return list_of(std::move(halves));
  END_HANDLE_TH_ERRORS
}

// copies(tensors, dtype): as the node's copies, outside the graph.
PyObject* copies(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(
      count == 2 && PyList_Check(args[0]) && THPDtype_Check(args[1]),
      "copies(tensors: list, dtype: torch.dtype)");
  const std::vector<Tensor> tensors = tensors_of(args[0]);
  const auto dtype = reinterpret_cast<THPDtype*>(args[1])->scalar_type;
  std::vector<Tensor> made;
  {
    pybind11::gil_scoped_release no_gil;
    made = copies_of(tensors, dtype);
  }
  return list_of(std::move(made));
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

// on_missing(function): have `function(plan, ids)` called for weights that a pass did not reach.
PyObject* on_missing(PyObject*, PyObject* function) {
  Py_INCREF(function);
  Py_XSETREF(note_missing, function);
  Py_RETURN_NONE;
}

PyObject* observers = nullptr;

// watch(list): the list of those that look at casts.
PyObject* watch(PyObject*, PyObject* list) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(PyList_CheckExact(list), "watch(observers: list)");
  Py_INCREF(list);
  Py_XSETREF(observers, list);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// ---- A patched call ---------------------------------------------------------------------------

PyObject* UNUSUAL = nullptr;  // what `call_cast` returns for arguments that it does not cast

struct Names {
  PyObject *thread, *forward, *graphed, *plain, *in_inference, *used, *hits, *misses, *cast, *plan,
      *bucket_of, *touched, *alone, *kept, *is_compiling;
};
Names names;

PyObject* compiler = nullptr;  // the module torch.compiler

// As `probes.is_recording`; also if that cannot be told.
bool is_recording() {
  constexpr auto transform = c10::DispatchKey::FuncTorchDynamicLayerFrontMode;
  if (is_traced() || c10::impl::tls_is_dispatch_key_included(transform)) return true;
  THPObjectPtr flag(PyObject_GetAttr(compiler, names.is_compiling));
  if (!flag) PyErr_Clear();
  return flag.get() != Py_False;
}

// The types that a call's arguments may have beside tensors, and tuples of these.
bool is_scalar(PyObject* value) {
  PyTypeObject* type = Py_TYPE(value);
  return value == Py_None || type == &PyLong_Type || type == &PyFloat_Type ||
      type == &PyBool_Type || type == &PyUnicode_Type || type == &THPDtypeType ||
      type == &PyComplex_Type || type == &THPSizeType;
}

class Caster {
 public:
  Caster(ScalarType to, PyObject* to_object, PyObject* cache, PyObject* devices)
      : to_(to), to_object_(to_object), cache_(cache), devices_(devices) {}

  // Whether `cast` knows this kind of argument.  A list in lists in lists, `deepest` of them, is
  // none: it may hold itself.
  static bool is_usual(PyObject* value, int deepest = 8) {
    if (is_plain_tensor(value)) return THPVariable_Unpack(value).layout() == at::kStrided;
    if (is_scalar(value)) return true;
    if (!is_sequence(value) || deepest == 0) return false;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
      if (!is_usual(PySequence_Fast_GET_ITEM(value, i), deepest - 1)) return false;
    }
    return true;
  }

  // A new reference to what the call gets for a usual `value`; nullptr: an error is set.
  PyObject* cast(PyObject* value) {
    if (is_plain_tensor(value)) return cast_tensor(value);
    if (is_sequence(value)) return cast_inside(value);
    return Py_NewRef(value);
  }

 private:
  // A Tensor or a Parameter, and no subclass of these.
  static bool is_plain_tensor(PyObject* value) {
    const auto type = reinterpret_cast<PyObject*>(Py_TYPE(value));
    return type == THPVariableClass || type == ParameterClass;
  }

  static bool is_sequence(PyObject* value) {
    return PyTuple_CheckExact(value) || PyList_CheckExact(value);
  }

  PyObject* cast_tensor(PyObject* value) {
    const Tensor& tensor = THPVariable_Unpack(value);
    const ScalarType from = tensor.scalar_type();
    if (from == to_ || (from != at::kFloat && from != at::kHalf && from != at::kBFloat16) ||
        !is_covered(tensor)) {
      return Py_NewRef(value);
    }
    if (reinterpret_cast<PyObject*>(Py_TYPE(value)) == ParameterClass) {
      return cast_weight(value, tensor);
    }
    Tensor made;
    {
      pybind11::gil_scoped_release no_gil;
      made = tensor.to(to_);
    }
    return THPVariable_Wrap(std::move(made));
  }

  // The same object where nothing inside changes; the caller's is left as it is.
  PyObject* cast_inside(PyObject* sequence) {
    THPObjectPtr items(PySequence_Tuple(sequence));  // a list may change meanwhile
    if (!items) return nullptr;
    const Py_ssize_t size = PyTuple_GET_SIZE(items.get());
    const bool is_list = PyList_CheckExact(sequence);
    THPObjectPtr made(is_list ? PyList_New(size) : PyTuple_New(size));
    if (!made) return nullptr;
    bool has_changed = false;
    for (Py_ssize_t i = 0; i < size; ++i) {
      PyObject* item = PyTuple_GET_ITEM(items.get(), i);
      PyObject* value = cast(item);
      if (value == nullptr) return nullptr;
      has_changed = has_changed || value != item;
      is_list ? PyList_SET_ITEM(made.get(), i, value) : PyTuple_SET_ITEM(made.get(), i, value);
    }
    return has_changed ? made.release() : Py_NewRef(sequence);
  }

  bool is_covered(const Tensor& tensor) const {
    if (devices_ == Py_None) return true;
    if (!PyAnySet_Check(devices_)) return false;
    const std::string kind = c10::DeviceTypeName(tensor.device().type(), true);
    THPObjectPtr name(PyUnicode_FromStringAndSize(kind.data(), kind.size()));
    if (!name) throw python_error();
    return PySet_Contains(devices_, name) == 1;
  }

  // As `WeightCache.cast`: the copy made earlier in this forward, if it still serves.
  PyObject* cast_weight(PyObject* weight, const Tensor& tensor) {
    if (!forward_) {
      THPObjectPtr thread(got(cache_, names.thread));
      forward_ = got(thread, names.forward);
    }
    PyObject* half = nullptr;
    if (forward_.get() != Py_None && !tensor.is_inference()) half = in_forward(weight, tensor);
    if (half != nullptr) return half;
    return PyObject_CallMethodObjArgs(cache_, names.cast, weight, to_object_, nullptr);
  }

  // nullptr, with no error set: `WeightCache.cast` must decide.
  PyObject* in_forward(PyObject* weight, const Tensor& tensor) {
    const bool in_graph = tensor.requires_grad() && at::GradMode::is_enabled();
    THPObjectPtr copies(got(forward_, in_graph ? names.graphed : names.plain));
    THPObjectPtr id(checked(PyLong_FromVoidPtr(weight)));
    PyObject* entry = PyDict_GetItemWithError(copies, id);
    if (entry == nullptr) {
      if (PyErr_Occurred()) throw python_error();
      return is_cast_alone(weight, id) ? cast_alone(weight, tensor, copies, id) : nullptr;
    }
    PyObject* half = PyTuple_GET_ITEM(entry, 0);
    const auto version = PyLong_AsLongLong(PyTuple_GET_ITEM(entry, 1));
    if (version != static_cast<long long>(tensor._version()) ||
        THPVariable_Unpack(half).scalar_type() != to_) {
      return nullptr;
    }
    if (!c10::InferenceMode::is_enabled() && is_true(names.in_inference)) return nullptr;
    THPObjectPtr result(Py_NewRef(half));
    note(names.used, id);
    count(names.hits);
    return Py_NewRef(result.get());
  }

  // Whether it is known here that no other weight is cast with this one, as
  // `weight_cache._together` says, and that its copy is kept.
  bool is_cast_alone(PyObject* weight, PyObject* id) {
    if (to_ == at::kFloat || observers == nullptr || PyList_GET_SIZE(observers) != 0 ||
        is_true(names.in_inference) != c10::InferenceMode::is_enabled() || is_recording()) {
      return false;
    }
    THPObjectPtr touched(got(forward_, names.touched));
    if (PySet_Contains(touched, id) != 0) return false;
    THPObjectPtr plan(got(forward_, names.plan));
    if (plan.get() == Py_None) return true;
    THPObjectPtr bucket_of(got(plan, names.bucket_of));
    if (PyDict_GetItemWithError(bucket_of, id) != nullptr) return has_hooks(weight);
    THPObjectPtr alone(got(forward_, names.alone));
    if (PyErr_Occurred() || PyDict_SetDefault(alone, id, weight) == nullptr) throw python_error();
    return true;
  }

  // As `WeightCache._make` for one weight.
  PyObject* cast_alone(PyObject* weight, const Tensor& tensor, PyObject* copies, PyObject* id) {
    THPObjectPtr version(checked(PyLong_FromLongLong(tensor._version())));
    Tensor made;
    {
      pybind11::gil_scoped_release no_gil;
      made = tensor.to(to_);
    }
    THPObjectPtr half(checked(THPVariable_Wrap(std::move(made))));
    THPObjectPtr entry(checked(PyTuple_Pack(2, half.get(), version.get())));
    THPObjectPtr kept(got(forward_, names.kept));
    if (PyDict_SetItem(copies, id, entry) != 0 || PyList_Append(kept, weight) != 0) {
      throw python_error();
    }
    note(names.used, id);
    count(names.misses);
    return Py_NewRef(half.get());
  }

  static PyObject* checked(PyObject* made) {
    if (made == nullptr) throw python_error();
    return made;
  }

  static PyObject* got(PyObject* object, PyObject* name) {
    return checked(PyObject_GetAttr(object, name));
  }

  bool is_true(PyObject* name) {
    THPObjectPtr flag(got(forward_, name));
    return flag.get() == Py_True;
  }

  void note(PyObject* name, PyObject* id) {
    THPObjectPtr ids(got(forward_, name));
    if (PySet_Add(ids, id) != 0) throw python_error();
  }

  void count(PyObject* name) {
    THPObjectPtr number(got(cache_, name));
    THPObjectPtr more(checked(PyLong_FromLongLong(PyLong_AsLongLong(number) + 1)));
    if (PyObject_SetAttr(cache_, name, more) != 0) throw python_error();
  }

  const ScalarType to_;
  PyObject* const to_object_;
  PyObject* const cache_;
  PyObject* const devices_;
  THPObjectPtr forward_;
};

// call_cast(function, args, kwargs, dtype, cache, devices): calls `function` with its tensors cast.
// UNUSUAL: an argument is none of the usual kinds, and nothing was called.
PyObject* call_cast(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(
      count == 6 && PyTuple_CheckExact(args[1]) && PyDict_CheckExact(args[2]) &&
          THPDtype_Check(args[3]),
      "call_cast(function, args: tuple, kwargs: dict, dtype: torch.dtype, cache, devices)");
  Caster caster(
      reinterpret_cast<THPDtype*>(args[3])->scalar_type, args[3], args[4], args[5]);
  const Py_ssize_t positional = PyTuple_GET_SIZE(args[1]);
  PyObject *name = nullptr, *given = nullptr;
  Py_ssize_t place = 0;
  for (Py_ssize_t i = 0; i < positional; ++i) {
    if (!Caster::is_usual(PyTuple_GET_ITEM(args[1], i))) return Py_NewRef(UNUSUAL);
  }
  while (PyDict_Next(args[2], &place, &name, &given)) {
    if (!Caster::is_usual(given)) return Py_NewRef(UNUSUAL);
  }
  THPObjectPtr cast_args(PyTuple_New(positional));
  if (!cast_args) return nullptr;
  for (Py_ssize_t i = 0; i < positional; ++i) {
    PyObject* value = caster.cast(PyTuple_GET_ITEM(args[1], i));
    if (value == nullptr) return nullptr;
    PyTuple_SET_ITEM(cast_args.get(), i, value);
  }
  if (PyDict_GET_SIZE(args[2]) == 0) return PyObject_Call(args[0], cast_args, nullptr);
  THPObjectPtr cast_kwargs(PyDict_New());
  if (!cast_kwargs) return nullptr;
  place = 0;
  while (PyDict_Next(args[2], &place, &name, &given)) {
    THPObjectPtr value(caster.cast(given));
    if (!value) return nullptr;
    if (PyDict_SetItem(cast_kwargs, name, value) != 0) return nullptr;
  }
  return PyObject_Call(args[0], cast_args, cast_kwargs);
  END_HANDLE_TH_ERRORS
}

// ---- Entries of modules' tables ----------------------------------------------------------------

PyObject* item(PyObject* list, Py_ssize_t place) { return PyList_GET_ITEM(list, place); }

bool are_lists(PyObject* const* args, Py_ssize_t count) {
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!PyList_CheckExact(args[i]) || PyList_GET_SIZE(args[i]) != PyList_GET_SIZE(args[0])) {
      return false;
    }
  }
  return true;
}

// entries_are(tables, names, values): whether each table has this very value under the name.
PyObject* entries_are(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(
      count == 3 && are_lists(args, 3), "entries_are(tables: list, names: list, values: list)");
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]); ++i) {
    PyObject* found = PyDict_GetItemWithError(item(args[0], i), item(args[1], i));
    if (found == nullptr && PyErr_Occurred()) return nullptr;
    if ((found == nullptr ? Py_None : found) != item(args[2], i)) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// What a list has at the place that a number says; borrowed.
PyObject* chosen(PyObject* list, PyObject* number) {
  const Py_ssize_t place = PyLong_AsSsize_t(number);
  TORCH_CHECK_INDEX(place >= 0 && place < PyList_GET_SIZE(list), "no such place");
  return item(list, place);
}

// exchange_entries(tables, names, sources, new, old): entry i becomes new[sources[i]]; with `old`
// only if all are old[sources[i]], which is returned.
PyObject* exchange_entries(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(
      count == 5 && are_lists(args, 3) && PyList_CheckExact(args[3]) &&
          (args[4] == Py_None || PyList_CheckExact(args[4])),
      "exchange_entries(tables: list, names: list, sources: list, new: list, old: list | None)");
  const Py_ssize_t size = PyList_GET_SIZE(args[0]);
  for (Py_ssize_t i = 0; i < size && args[4] != Py_None; ++i) {
    PyObject* found = PyDict_GetItemWithError(item(args[0], i), item(args[1], i));
    if (found == nullptr && PyErr_Occurred()) return nullptr;
    if (found != chosen(args[4], item(args[2], i))) Py_RETURN_FALSE;
  }
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* value = chosen(args[3], item(args[2], i));
    if (PyDict_SetItem(item(args[0], i), item(args[1], i), value) != 0) return nullptr;
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// put_entries_in(tables, names, values): tables[i][names[i]] = values[i].
PyObject* put_entries_in(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(
      count == 3 && are_lists(args, 3), "put_entries_in(tables: list, names: list, values: list)");
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]); ++i) {
    if (PyObject_SetItem(item(args[0], i), item(args[1], i), item(args[2], i)) != 0) return nullptr;
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// take_entries_out(tables, names): the names are removed, where they are there.
PyObject* take_entries_out(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(
      count == 2 && are_lists(args, 2), "take_entries_out(tables: list, names: list)");
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]); ++i) {
    const int is_there = PyDict_Contains(item(args[0], i), item(args[1], i));
    if (is_there < 0) return nullptr;
    if (is_there == 1 && PyObject_DelItem(item(args[0], i), item(args[1], i)) != 0) return nullptr;
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// share_attributes(tensors, attributes): tensors[i].__dict__ = attributes[i] of plain tensors.
PyObject* share_attributes(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(
      count == 2 && are_lists(args, 2), "share_attributes(tensors: list, attributes: list)");
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]); ++i) {
    PyObject* tensor = item(args[0], i);
    if (reinterpret_cast<PyObject*>(Py_TYPE(tensor)) == THPVariableClass &&
        PyObject_GenericSetDict(tensor, item(args[1], i), nullptr) != 0) {
      return nullptr;
    }
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// ---- The optimizer side: questions about lists of tensors ---------------------------------------

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

// ---- The optimizer side: gradients --------------------------------------------------------------

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

template <typename F>
PyCFunction fast(F function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"are_alike", fast(are_alike), METH_FASTCALL, nullptr},
    {"call_cast", fast(call_cast), METH_FASTCALL, nullptr},
    {"cast_together", fast(cast_together), METH_FASTCALL, nullptr},
    {"copies", fast(copies), METH_FASTCALL, nullptr},
    {"drop_grads", drop_grads, METH_O, nullptr},
    {"entries_are", fast(entries_are), METH_FASTCALL, nullptr},
    {"exchange_entries", fast(exchange_entries), METH_FASTCALL, nullptr},
    {"fitting_copy", fast(fitting_copy), METH_FASTCALL, nullptr},
    {"grads_of", grads_of, METH_O, nullptr},
    {"on_missing", on_missing, METH_O, nullptr},
    {"put_entries_in", fast(put_entries_in), METH_FASTCALL, nullptr},
    {"share_attributes", fast(share_attributes), METH_FASTCALL, nullptr},
    {"take_entries_out", fast(take_entries_out), METH_FASTCALL, nullptr},
    {"unscale", fast(unscale), METH_FASTCALL, nullptr},
    {"watch", watch, METH_O, nullptr},
    {"with_grads", with_grads, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_ampatch_native", nullptr, -1, methods, nullptr, nullptr, nullptr,
    nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__ampatch_native() {
  HANDLE_TH_ERRORS
  const std::pair<PyObject**, const char*> interned[] = {
      {&grad_name, "grad"},
      {&names.thread, "_thread"},
      {&names.forward, "forward"},
      {&names.graphed, "graphed"},
      {&names.plain, "plain"},
      {&names.in_inference, "in_inference"},
      {&names.used, "used"},
      {&names.hits, "hits"},
      {&names.misses, "misses"},
      {&names.cast, "cast"},
      {&names.plan, "plan"},
      {&names.bucket_of, "bucket_of"},
      {&names.touched, "touched"},
      {&names.alone, "alone"},
      {&names.kept, "kept"},
      {&names.is_compiling, "_is_compiling_flag"},
  };
  for (const auto& [place, name] : interned) {
    *place = PyUnicode_InternFromString(name);
    if (*place == nullptr) return nullptr;
  }
  compiler = PyImport_ImportModule("torch.compiler");
  if (compiler == nullptr) return nullptr;
  learn_nan();
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr) return nullptr;
  UNUSUAL = PyObject_CallNoArgs(reinterpret_cast<PyObject*>(&PyBaseObject_Type));
  if (UNUSUAL == nullptr || PyModule_AddObjectRef(module, "UNUSUAL", UNUSUAL) != 0) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
  END_HANDLE_TH_ERRORS
}
