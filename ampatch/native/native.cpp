// The native part of ampatch: the most frequent work of a training step, without Python's overhead.
//
// Every function has a twin in Python that gives the same bits, and names it ("In Python: ...").  A
// function leaves arguments that it cannot handle to its twin.  ATen's operators compute, so that
// one source serves every device; only small tensors in CPU memory are copied here.

#include <type_traits>
#include <utility>

#include "call.h"
#include "gradients.h"

namespace {

template <typename F>
PyCFunction fast(F function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"all_may_share_node", fast(all_may_share_node), METH_FASTCALL, nullptr},
    {"call_cast", fast(call_cast), METH_FASTCALL, nullptr},
    {"cast_weights", fast(cast_weights), METH_FASTCALL, nullptr},
    {"set_entries", fast(set_entries), METH_FASTCALL, nullptr},
    {"fitting_copy", fast(fitting_copy), METH_FASTCALL, nullptr},
    {"set_observers", set_observers, METH_O, nullptr},
    {"unscale", fast(unscale), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_ampatch_native", nullptr, -1, methods, nullptr, nullptr, nullptr,
    nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__ampatch_native() {
  HANDLE_TH_ERRORS
  const std::pair<PyObject**, const char*> interned[] = {
      {&names.thread_calls, "_thread_calls"},
      {&names.forward_copies, "forward_copies"},
      {&names.cache, "cache"},
      {&names.in_graph, "in_graph"},
      {&names.frozen, "frozen"},
      {&names.under_no_grad, "under_no_grad"},
      {&names.in_inference_mode, "in_inference_mode"},
      {&names.used_weights, "used_weights"},
      {&names.hits, "hits"},
      {&names.misses, "misses"},
      {&names.cast, "cast"},
      {&names.cast_at_each_use_ids, "cast_at_each_use_ids"},
      {&names.kept_weights, "kept_weights"},
      {&names.is_compiling, "_is_compiling_flag"},
  };
  for (const auto& [variable, name] : interned) {
    *variable = PyUnicode_InternFromString(name);
    if (*variable == nullptr) return nullptr;
  }
  compiler = PyImport_ImportModule("torch.compiler");
  if (compiler == nullptr) return nullptr;
  set_bfloat16_nan();
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr) return nullptr;
  NOT_HANDLED = PyObject_CallNoArgs(reinterpret_cast<PyObject*>(&PyBaseObject_Type));
  if (NOT_HANDLED == nullptr || PyModule_AddObjectRef(module, "NOT_HANDLED", NOT_HANDLED) != 0) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
  END_HANDLE_TH_ERRORS
}
