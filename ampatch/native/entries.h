// Entries of modules' tables, many in one call: `models/lent_places.py, models/submodule_calls.py`.
#pragma once

#include "copies.h"

namespace {

PyObject* item(PyObject* list, Py_ssize_t place) { return PyList_GET_ITEM(list, place); }

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

}  // namespace
