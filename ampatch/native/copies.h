// Copies of tensors in another dtype: made here for small tensors in CPU memory, else by ATen.
#pragma once

#include <Python.h>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <cmath>
#include <utility>
#include <vector>

namespace {

using at::ScalarType;
using at::Tensor;

constexpr c10::DispatchKeySet kPlainCpu({
    c10::DispatchKey::CPU, c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::AutogradCPU,
    c10::DispatchKey::AutocastCPU});

// On the CPU a call of an operator costs as much as converting some thousand values.
constexpr int64_t kMaxNativeNumel = 4096;

// Whether the tensor's values are in CPU memory.  ATen reports the error for a freed storage
// (`resize_(0)`).
bool is_in_memory(const Tensor& tensor) {
  return tensor.key_set() == kPlainCpu && tensor.unsafeGetTensorImpl()->storage_initialized();
}

// Whether this code may read and write the tensor's values, in the order of its memory.
bool is_small(const Tensor& tensor) {
  return is_in_memory(tensor) && tensor.numel() <= kMaxNativeNumel &&
      tensor.is_non_overlapping_and_dense();
}

uint16_t bfloat16_nan = 0x7fc0;  // the bits to which ATen casts any NaN; they depend on the CPU

// Casts FP32 to bfloat16: to the nearest, ties to even, like c10::BFloat16.
void narrow(uint16_t* to, const uint32_t* from, int64_t size) {
  const uint16_t nan = bfloat16_nan;
  for (int64_t i = 0; i < size; ++i) {
    const uint32_t bits = from[i];
    const uint32_t half = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to[i] = (bits & 0x7fffffff) > 0x7f800000 ? nan : static_cast<uint16_t>(half);
  }
}

// Reads `bfloat16_nan` from ATen.  The import may run inside modes and transforms, under which the
// tensor would have no values.
void set_bfloat16_nan() {
  const c10::impl::ForceDispatchKeyGuard plain(
      c10::default_included_set, c10::default_excluded_set);
  const Tensor nan = at::full({16}, NAN, at::TensorOptions(at::kFloat)).to(at::kBFloat16);
  bfloat16_nan = *static_cast<const uint16_t*>(nan.const_data_ptr());
}

// Casts bfloat16 to FP32.
void widen(uint32_t* to, const uint16_t* from, int64_t size) {
  for (int64_t i = 0; i < size; ++i) to[i] = static_cast<uint32_t>(from[i]) << 16;
}

// Returns a copy in `dtype`, or an undefined tensor if ATen must make it.
Tensor small_copy(const Tensor& tensor, ScalarType dtype) {
  const ScalarType from = tensor.scalar_type();
  const bool narrows = from == at::kFloat && dtype == at::kBFloat16;
  if (!(narrows || (from == at::kBFloat16 && dtype == at::kFloat)) || !is_small(tensor)) return {};
  Tensor copy = at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), dtype);
  if (narrows) {
    narrow(static_cast<uint16_t*>(copy.mutable_data_ptr()),
           static_cast<const uint32_t*>(tensor.const_data_ptr()), tensor.numel());
  } else {
    widen(static_cast<uint32_t*>(copy.mutable_data_ptr()),
          static_cast<const uint16_t*>(tensor.const_data_ptr()), tensor.numel());
  }
  return copy;
}

// New tensors with these values in `dtype`, outside the graph.
std::vector<Tensor> copies_of(at::TensorList tensors, ScalarType dtype) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const bool may_copy_small = !c10::impl::TorchDispatchModeTLS::any_modes_set();
  std::vector<Tensor> copies, rest_copies, rest;
  copies.reserve(tensors.size());
  for (const Tensor& tensor : tensors) {
    copies.push_back(may_copy_small ? small_copy(tensor, dtype) : Tensor());
    if (copies.back().defined()) continue;
    copies.back() = at::empty_like(tensor, tensor.options().dtype(dtype));
    rest_copies.push_back(copies.back());
    rest.push_back(tensor);
  }
  if (!rest.empty()) at::_foreach_copy_(rest_copies, rest);
  return copies;
}

// Makes a copy made under `no_grad` require a gradient if its weight does: see `cast_weights`.
void require_grad_as(const Tensor& weight, Tensor& copy) {
  if (weight.requires_grad()) copy.set_requires_grad(true);
}

std::vector<Tensor> tensors_of(PyObject* list) {
  std::vector<Tensor> tensors;
  const Py_ssize_t size = PyList_GET_SIZE(list);
  tensors.reserve(size);
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* item = PyList_GET_ITEM(list, i);
    TORCH_CHECK_TYPE(THPVariable_Check(item), "expected a list of tensors");
    tensors.push_back(THPVariable_Unpack(item));
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

// Whether all values of a small FP32 tensor lie within (-limit, limit); NaN does not.
bool lies_within(const Tensor& tensor, float limit) {
  const float* values = tensor.const_data_ptr<float>();
  bool is_within = true;
  for (int64_t i = 0; i < tensor.numel(); ++i) is_within &= std::fabs(values[i]) < limit;
  return is_within;
}

// fitting_copy(tensor, dtype, limit): returns a small FP32 tensor in bfloat16 if its values lie
// within (-limit, limit), or None if a value does not, or if ATen, autograd or a dispatch mode must
// make the copy.
// In Python: `InputCaster._cast_tensor` of `models/io_casting.py`.
PyObject* fitting_copy(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(
      nargs == 3 && THPVariable_Check(args[0]) && THPDtype_Check(args[1]) && PyFloat_Check(args[2]),
      "fitting_copy(tensor: Tensor, dtype: torch.dtype, limit: float)");
  const Tensor& tensor = THPVariable_Unpack(args[0]);
  const auto dtype = reinterpret_cast<THPDtype*>(args[1])->scalar_type;
  const bool needs_grad = (tensor.requires_grad() && at::GradMode::is_enabled()) ||
      tensor._fw_grad(/*level=*/0).defined();
  if (needs_grad || dtype != at::kBFloat16 || tensor.scalar_type() != at::kFloat ||
      c10::impl::TorchDispatchModeTLS::any_modes_set() || !is_small(tensor) ||
      !lies_within(tensor, static_cast<float>(PyFloat_AS_DOUBLE(args[2])))) {
    Py_RETURN_NONE;
  }
  return THPVariable_Wrap(small_copy(tensor, dtype));
  END_HANDLE_TH_ERRORS
}

}  // namespace
