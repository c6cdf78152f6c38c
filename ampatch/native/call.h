// A patched call: `call_cast`, for the usual kinds of arguments.
#pragma once

#include <torch/csrc/Size.h>

#include <algorithm>

#include "weights.h"

namespace {

PyObject* NOT_HANDLED = nullptr;  // `call_cast` returns it for arguments that it cannot cast

struct AttributeNames {
  PyObject *thread_calls, *forward_copies, *cache, *in_graph, *frozen, *under_no_grad,
      *in_inference_mode, *used_weights, *hits, *misses, *cast, *cast_at_each_use_ids,
      *kept_weights, *is_compiling;
};
AttributeNames names;

PyObject* compiler = nullptr;  // the module torch.compiler

// Whether operations are traced or transformed; true also if torch does not tell.
// In Python: `is_traced_or_transformed` of `torch_private/probes.py`.
bool is_traced_or_transformed() {
  constexpr auto transform = c10::DispatchKey::FuncTorchDynamicLayerFrontMode;
  if (is_jit_or_fx_traced() || c10::impl::tls_is_dispatch_key_included(transform)) return true;
  THPObjectPtr flag(PyObject_GetAttr(compiler, names.is_compiling));
  if (!flag) PyErr_Clear();
  return flag.get() != Py_False;
}

// Whether `value` has one of the usual types of arguments other than tensors and sequences.
// The same types as `NON_TENSOR_TYPES` of `casting/rules.py`.
bool is_non_tensor(PyObject* value) {
  PyTypeObject* type = Py_TYPE(value);
  return value == Py_None || type == &PyLong_Type || type == &PyFloat_Type ||
      type == &PyBool_Type || type == &PyUnicode_Type || type == &THPDtypeType ||
      type == &PyComplex_Type || type == &THPSizeType;
}

class Caster {
 public:
  Caster(ScalarType to, PyObject* to_object, PyObject* cache, PyObject* devices)
      : to_(to), to_object_(to_object), cache_(cache), devices_(devices) {}

  // Whether `cast` can handle this argument.  Lists nested more than `max_depth` deep are refused,
  // because a list may contain itself.
  static bool can_cast(PyObject* value, int max_depth = 8) {
    if (is_plain_tensor(value)) return THPVariable_Unpack(value).layout() == at::kStrided;
    if (is_non_tensor(value)) return true;
    if (!is_sequence(value) || max_depth == 0 || is_flat_weights(value)) return false;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
      if (!can_cast(PySequence_Fast_GET_ITEM(value, i), max_depth - 1)) return false;
    }
    return true;
  }

  // Returns a new reference to `value` or to its cast, or nullptr if an error is set.
  PyObject* cast(PyObject* value) {
    if (is_plain_tensor(value)) return cast_tensor(value);
    if (is_sequence(value)) return cast_sequence(value);
    return Py_NewRef(value);
  }

  // Adds the hits and misses to the cache's counters.  To be called once all arguments are cast.
  void add_to_counters() {
    add(names.hits, hits_);
    add(names.misses, misses_);
  }

 private:
  // Whether `value` is a Tensor or a Parameter, and of no subclass.
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
        !is_on_cast_device(tensor)) {
      return Py_NewRef(value);
    }
    if (reinterpret_cast<PyObject*>(Py_TYPE(value)) == ParameterClass) {
      return cast_weight(value, tensor);
    }
    Tensor copy;
    {
      pybind11::gil_scoped_release no_gil;
      copy = tensor.to(to_);
      if (!at::GradMode::is_enabled()) require_grad_as(tensor, copy);
    }
    return THPVariable_Wrap(std::move(copy));
  }

  // Whether a list begins with two parameters in one storage: an RNN's flattened weights (cuDNN).
  static bool is_flat_weights(PyObject* sequence) {
    if (!PyList_CheckExact(sequence) || PyList_GET_SIZE(sequence) < 2) return false;
    PyObject *first = PyList_GET_ITEM(sequence, 0), *second = PyList_GET_ITEM(sequence, 1);
    if (Py_TYPE(first) != Py_TYPE(second) ||
        reinterpret_cast<PyObject*>(Py_TYPE(first)) != ParameterClass) {
      return false;
    }
    const Tensor &weight = THPVariable_Unpack(first), &next = THPVariable_Unpack(second);
    return weight.has_storage() && next.has_storage() && weight.is_alias_of(next);
  }

  // Returns a new sequence with cast items, or the caller's own if no item changes.
  PyObject* cast_sequence(PyObject* sequence) {
    THPObjectPtr items(PySequence_Tuple(sequence));  // a list may change meanwhile
    if (!items) return nullptr;
    const Py_ssize_t size = PyTuple_GET_SIZE(items.get());
    const bool is_list = PyList_CheckExact(sequence);
    THPObjectPtr result(is_list ? PyList_New(size) : PyTuple_New(size));
    if (!result) return nullptr;
    bool has_changed = false;
    for (Py_ssize_t i = 0; i < size; ++i) {
      PyObject* item = PyTuple_GET_ITEM(items.get(), i);
      PyObject* value = cast(item);
      if (value == nullptr) return nullptr;
      has_changed = has_changed || value != item;
      is_list ? PyList_SET_ITEM(result.get(), i, value) : PyTuple_SET_ITEM(result.get(), i, value);
    }
    return has_changed ? result.release() : Py_NewRef(sequence);
  }

  bool is_on_cast_device(const Tensor& tensor) const {
    if (devices_ == Py_None) return true;
    if (!PyAnySet_Check(devices_)) return false;
    const std::string type = c10::DeviceTypeName(tensor.device().type(), true);
    THPObjectPtr name(PyUnicode_FromStringAndSize(type.data(), type.size()));
    if (!name) throw python_error();
    return PySet_Contains(devices_, name) == 1;
  }

  // Returns the half copy made earlier in this forward, if it is still valid, or a new one.
  // In Python: `WeightCache.cast` of `casting/weight_cache.py`.
  PyObject* cast_weight(PyObject* weight, const Tensor& tensor) {
    if (!forward_copies_) {
      THPObjectPtr calls(attribute(cache_, names.thread_calls));
      forward_copies_ = attribute(calls, names.forward_copies);
      if (forward_copies_.get() != Py_None) {
        THPObjectPtr cache(attribute(forward_copies_, names.cache));
        if (cache.get() != cache_) forward_copies_ = Py_NewRef(Py_None);
      }
    }
    const bool may_have_copy = forward_copies_.get() != Py_None && !tensor.is_inference();
    PyObject* half_copy = may_have_copy ? copy_in_forward(weight, tensor) : nullptr;
    if (half_copy != nullptr) return half_copy;
    return PyObject_CallMethodObjArgs(cache_, names.cast, weight, to_object_, nullptr);
  }

  // Returns the forward's half copy, an existing or a new one.  Returns nullptr with no error set if
  // `WeightCache.cast` has to be called.
  PyObject* copy_in_forward(PyObject* weight, const Tensor& tensor) {
    THPObjectPtr copies(attribute(
        forward_copies_,
        !at::GradMode::is_enabled() ? names.under_no_grad
            : tensor.requires_grad() ? names.in_graph : names.frozen));
    THPObjectPtr id(checked(PyLong_FromVoidPtr(weight)));
    PyObject* entry = PyDict_GetItemWithError(copies, id);
    if (entry == nullptr) {
      if (PyErr_Occurred()) throw python_error();
      return may_keep_copy(id) ? make_copy(weight, tensor, copies, id) : nullptr;
    }
    PyObject* half_copy = PyTuple_GET_ITEM(entry, 0);
    const auto version = PyLong_AsLongLong(PyTuple_GET_ITEM(entry, 1));
    if (version != static_cast<long long>(tensor._version()) ||
        THPVariable_Unpack(half_copy).scalar_type() != to_) {
      return nullptr;
    }
    if (!c10::InferenceMode::is_enabled() && is_true(names.in_inference_mode)) return nullptr;
    THPObjectPtr result(Py_NewRef(half_copy));
    record_use(id, weight);
    ++hits_;
    return result.release();
  }

  // Whether there are no observers of casts, and a copy made now may be used again.
  // In Python: `WeightCache._may_keep_copy` of `casting/weight_cache.py`.
  bool may_keep_copy(PyObject* id) {
    if (to_ == at::kFloat || observers == nullptr || PyList_GET_SIZE(observers) != 0 ||
        is_true(names.in_inference_mode) != c10::InferenceMode::is_enabled() ||
        is_traced_or_transformed()) {
      return false;
    }
    THPObjectPtr cast_at_each_use_ids(attribute(forward_copies_, names.cast_at_each_use_ids));
    return PySet_Contains(cast_at_each_use_ids, id) == 0;
  }

  // In Python: `WeightCache._make_copy` of `casting/weight_cache.py`.
  PyObject* make_copy(PyObject* weight, const Tensor& tensor, PyObject* copies, PyObject* id) {
    THPObjectPtr version(checked(PyLong_FromLongLong(tensor._version())));
    Tensor copy;
    {
      pybind11::gil_scoped_release no_gil;
      copy = tensor.to(to_);
      if (!at::GradMode::is_enabled()) copy.set_requires_grad(true);
    }
    THPObjectPtr half_copy(checked(THPVariable_Wrap(std::move(copy))));
    THPObjectPtr entry(checked(PyTuple_Pack(2, half_copy.get(), version.get())));
    THPObjectPtr kept_weights(attribute(forward_copies_, names.kept_weights));
    if (PyDict_SetItem(copies, id, entry) != 0 || PyList_Append(kept_weights, weight) != 0) {
      throw python_error();
    }
    record_use(id, weight);
    ++misses_;
    return half_copy.release();
  }

  static PyObject* checked(PyObject* object) {
    if (object == nullptr) throw python_error();
    return object;
  }

  static PyObject* attribute(PyObject* object, PyObject* name) {
    return checked(PyObject_GetAttr(object, name));
  }

  bool is_true(PyObject* name) {
    THPObjectPtr flag(attribute(forward_copies_, name));
    return flag.get() == Py_True;
  }

  void record_use(PyObject* id, PyObject* weight) {
    THPObjectPtr used_weights(attribute(forward_copies_, names.used_weights));
    if (PyDict_SetDefault(used_weights, id, weight) == nullptr) throw python_error();
  }

  void add(PyObject* name, int64_t more) {
    if (more == 0) return;
    THPObjectPtr number(attribute(cache_, name));
    THPObjectPtr sum(checked(PyLong_FromLongLong(PyLong_AsLongLong(number) + more)));
    if (PyObject_SetAttr(cache_, name, sum) != 0) throw python_error();
  }

  const ScalarType to_;
  PyObject* const to_object_;
  PyObject* const cache_;
  PyObject* const devices_;
  THPObjectPtr forward_copies_;
  int64_t hits_ = 0, misses_ = 0;
};

// call_cast(function, args, kwargs, dtype, cache, devices): calls `function` with its tensors cast.
// If it cannot cast an argument, calls nothing and returns NOT_HANDLED.
// In Python: `call_cast` of `casting/wrapper.py`.
PyObject* call_cast(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(
      nargs == 6 && PyTuple_CheckExact(args[1]) && PyDict_CheckExact(args[2]) &&
          THPDtype_Check(args[3]),
      "call_cast(function, args: tuple, kwargs: dict, dtype: torch.dtype, cache, devices)");
  Caster caster(
      reinterpret_cast<THPDtype*>(args[3])->scalar_type, args[3], args[4], args[5]);
  const Py_ssize_t num_args = PyTuple_GET_SIZE(args[1]);
  PyObject *name = nullptr, *argument = nullptr;
  Py_ssize_t position = 0;
  for (Py_ssize_t i = 0; i < num_args; ++i) {
    if (!Caster::can_cast(PyTuple_GET_ITEM(args[1], i))) return Py_NewRef(NOT_HANDLED);
  }
  while (PyDict_Next(args[2], &position, &name, &argument)) {
    if (!Caster::can_cast(argument)) return Py_NewRef(NOT_HANDLED);
  }
  THPObjectPtr cast_args(PyTuple_New(num_args));
  if (!cast_args) return nullptr;
  for (Py_ssize_t i = 0; i < num_args; ++i) {
    PyObject* value = caster.cast(PyTuple_GET_ITEM(args[1], i));
    if (value == nullptr) return nullptr;
    PyTuple_SET_ITEM(cast_args.get(), i, value);
  }
  if (PyDict_GET_SIZE(args[2]) == 0) {
    caster.add_to_counters();
    return PyObject_Call(args[0], cast_args, nullptr);
  }
  THPObjectPtr cast_kwargs(PyDict_New());
  if (!cast_kwargs) return nullptr;
  position = 0;
  while (PyDict_Next(args[2], &position, &name, &argument)) {
    THPObjectPtr value(caster.cast(argument));
    if (!value) return nullptr;
    if (PyDict_SetItem(cast_kwargs, name, value) != 0) return nullptr;
  }
  caster.add_to_counters();
  return PyObject_Call(args[0], cast_args, cast_kwargs);
  END_HANDLE_TH_ERRORS
}

}  // namespace
