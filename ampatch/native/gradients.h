// The optimizer side: unscaling (`scaling/unscaling.py`).
#pragma once

#include "weights.h"

namespace {

// Whether the kernel may write into a gradient: its values are in CPU memory, and it needs no
// gradient itself.
bool can_unscale(const Tensor& grad) {
  return grad.is_cpu() && is_plain(grad) && !grad.is_complex() && !grad.is_inference() &&
      !grad.is_neg() && !grad._is_zerotensor() && !grad.requires_grad();
}

// unscale(grads, scale): divides gradients by the 0-dim tensor `scale`, in place, and returns whether
// they had an inf or NaN.  If this code cannot handle one of them, does nothing and returns None.
// In Python: `unscale_` of `scaling/unscaling.py`.
PyObject* unscale(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(
      nargs == 2 && PyList_CheckExact(args[0]) && THPVariable_Check(args[1]),
      "unscale(grads: list, scale: Tensor)");
  const Tensor scale = THPVariable_Unpack(args[1]);
  if (c10::impl::TorchDispatchModeTLS::any_modes_set() || !scale.is_cpu()) Py_RETURN_NONE;
  const std::vector<Tensor> grads = tensors_of(args[0]);
  if (!std::all_of(grads.begin(), grads.end(), can_unscale)) Py_RETURN_NONE;
  if (grads.empty()) Py_RETURN_FALSE;
  Tensor found_inf;
  {
    pybind11::gil_scoped_release no_gil;
    at::NoGradGuard no_grad;
    found_inf = at::zeros_like(scale);
    at::_amp_foreach_non_finite_check_and_unscale_(grads, found_inf, scale.reciprocal());
  }
  return PyBool_FromLong(*found_inf.const_data_ptr<float>() != 0);
  END_HANDLE_TH_ERRORS
}

}  // namespace
