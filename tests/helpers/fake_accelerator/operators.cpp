// Every operator of the device: torch's own of the CPU, called on the same memory.
//
// No tensor is moved, so that results have the CPU's bits.  As on CUDA, tensors of the host that
// hold more than a number are refused beside tensors of the device.

#include <ATen/core/Tensor.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <set>
#include <string>
#include <vector>

#include "counts.h"
#include "memory.h"

namespace fake {

namespace {

using at::IValue;
using at::Tensor;
using torch::jit::Stack;

// The calls below come from below autograd and autocast, and stay there.
struct Below {
  c10::impl::ExcludeDispatchKeyGuard autograd{c10::autograd_dispatch_keyset_with_ADInplaceOrView};
  c10::impl::ExcludeDispatchKeyGuard autocast{c10::autocast_dispatch_keyset};
};

bool is_ours(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == DEVICE;
}

// What a tensor still owes: to be negated, say.
c10::DispatchKeySet lazy_keys(const Tensor& tensor) {
  return tensor.key_set() &
      c10::DispatchKeySet({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
                           c10::DispatchKey::ZeroTensor});
}

// A tensor of the CPU with the same memory.
Tensor seen_by_host(const Tensor& tensor) {
  auto found = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(host_memory(tensor.storage())),
      c10::DispatchKeySet(c10::DispatchKey::CPU) | lazy_keys(tensor), tensor.dtype());
  found.unsafeGetTensorImpl()->set_sizes_and_strides(
      tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return found;
}

// One call: the tensors of the device among its arguments, and what the CPU got instead.
class Call {
 public:
  explicit Call(const c10::OperatorHandle& op)
      : op_(op), name_(c10::toString(op.operator_name())) {}

  void run(Stack* stack) {
    take(stack);
    op_.callBoxed(stack);
    give(stack);
    note();
  }

 private:
  void take(Stack* stack) {
    const auto& arguments = op_.schema().arguments();
    const auto begin = stack->size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i) {
      auto& value = (*stack)[begin + i];
      value = to_host(value, arguments[i].name());
    }
    TORCH_CHECK(
        pairs_.empty() || strangers_.empty() || may_mix(),
        "Expected all tensors to be on the same device, but ", name_,
        " got tensors on fake:0 and, as '", strangers_.empty() ? "" : strangers_.front(),
        "', on cpu");
  }

  bool may_mix() const {
    // indices of the host are copied by these on CUDA too; lengths have to be there
    static const std::set<std::string> mixed{
        "aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put",
        "aten::_unsafe_index.Tensor", "aten::_pack_padded_sequence",
        "aten::_pack_padded_sequence_backward"};
    return mixed.count(name_) != 0;
  }

  bool takes_no_numbers() const {
    return name_.rfind("aten::_fused", 0) == 0 || name_.rfind("aten::_foreach", 0) == 0 ||
        name_.rfind("aten::_amp", 0) == 0;
  }

  Tensor to_host(const Tensor& tensor, const std::string& argument) {
    if (!tensor.defined()) return tensor;
    if (!is_ours(tensor)) {
      const bool is_number = tensor.dim() == 0 && (!takes_no_numbers() || argument == "lr");
      if (!is_number) strangers_.push_back(argument);
      return tensor;
    }
    for (const auto& [device, host] : pairs_) {
      if (device.is_same(tensor)) return host;
    }
    pairs_.emplace_back(tensor, seen_by_host(tensor));
    return pairs_.back().second;
  }

  IValue to_host(const IValue& value, const std::string& argument) {
    if (value.isTensor()) return to_host(value.toTensor(), argument);
    if (value.isTensorList()) {
      c10::List<Tensor> found;
      for (const Tensor& one : value.toTensorVector()) found.push_back(to_host(one, argument));
      return found;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> found;
      for (const auto& one : value.toOptionalTensorVector()) {
        found.push_back(one ? std::optional(to_host(*one, argument)) : one);
        if (one && one->scalar_type() == at::kBool && name_.find("index_put") != std::string::npos) {
          waits_ = true;  // how many elements the mask chooses is not known before
        }
      }
      return found;
    }
    if (value.isStorage() && value.toStorage().device_type() == DEVICE) {
      return host_memory(value.toStorage());
    }
    if (value.isDevice() && value.toDevice().type() == DEVICE) {
      makes_ours_ = true;
      return c10::Device(c10::DeviceType::CPU);
    }
    return value;
  }

  void give(Stack* stack) {
    for (auto& [device, host] : pairs_) follow(device, host);
    const auto returns = op_.schema().returns().size();
    for (auto i = stack->size() - returns; i < stack->size(); ++i) {
      auto& value = (*stack)[i];
      if (value.isTensor()) {
        value = to_device(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<Tensor> found;
        for (const Tensor& one : value.toTensorVector()) found.push_back(to_device(one));
        value = found;
      }
    }
  }

  // An operator may have given the host's tensor other memory or another shape.
  void follow(Tensor& device, const Tensor& host) {
    auto* impl = device.unsafeGetTensorImpl();
    auto* memory = host_memory(device.storage()).unsafeGetStorageImpl();
    if (host.storage().unsafeGetStorageImpl() != memory) {
      impl->set_storage_keep_dtype(storage_of(host));
    } else if (memory->data() != device.storage().data() ||
               memory->nbytes() != device.storage().nbytes()) {
      const auto& storage = device.storage();
      storage.set_data_ptr_noswap(pointer_to(host.storage()));
      storage.set_nbytes(host.storage().nbytes());
    }
    if (host.sizes() != device.sizes() || host.strides() != device.strides() ||
        host.storage_offset() != device.storage_offset()) {
      impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }

  // The storage of the device with the memory of a tensor of the host.
  c10::Storage storage_of(const Tensor& host) {
    auto* memory = host.storage().unsafeGetStorageImpl();
    for (const auto& [known, storage] : made_) {
      if (known == memory) return storage;
    }
    c10::Storage storage(
        c10::Storage::use_byte_size_t(), memory->nbytes(), pointer_to(host.storage()),
        c10::GetAllocator(DEVICE), true);
    made_.emplace_back(memory, storage);
    return storage;
  }

  Tensor to_device(const Tensor& host) {
    if (!host.defined() || (pairs_.empty() && !makes_ours_)) return host;
    for (const auto& [device, ours] : pairs_) {
      if (ours.is_same(host)) {
        writes_ = true;
        return device;
      }
    }
    TORCH_CHECK(host.layout() == at::kStrided, name_, ": the fake accelerator is dense");
    const auto* memory = host.storage().unsafeGetStorageImpl();
    Tensor found;
    for (const auto& [device, ours] : pairs_) {
      if (host_memory(device.storage()).unsafeGetStorageImpl() == memory) {
        makes_views_ = true;
        found = at::detail::make_tensor<c10::TensorImpl>(
            c10::TensorImpl::VIEW, c10::Storage(device.storage()), device.key_set(),
            host.dtype());
        break;
      }
    }
    if (!found.defined()) {
      makes_new_ = true;
      found = at::detail::make_tensor<c10::TensorImpl>(
          storage_of(host),
          c10::DispatchKeySet(c10::DispatchKey::PrivateUse1) | lazy_keys(host), host.dtype());
    }
    found.unsafeGetTensorImpl()->set_sizes_and_strides(
        host.sizes(), host.strides(), host.storage_offset());
    return found;
  }

  void note() const {
    static const std::set<std::string> waiting{
        "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2",
        "aten::unique_consecutive", "aten::unique_dim", "aten::bincount",
        "aten::repeat_interleave.Tensor", "aten::is_nonzero"};
    static const std::set<std::string> idle{
        "aten::resize_", "aten::resize_as_", "aten::_fused_sdp_choice",
        "aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset",
        "aten::set_.source_Tensor", "aten::set_"};
    const bool is_view = makes_views_ && !makes_new_ && !writes_;
    const bool is_empty = name_.rfind("aten::empty", 0) == 0;
    if (is_view || is_empty || idle.count(name_)) {
      count("idle", name_);
    } else {
      launch(name_);
    }
    if (waits_ || waiting.count(name_)) wait_for_device(name_);
  }

  const c10::OperatorHandle& op_;
  std::string name_;
  std::vector<std::pair<Tensor, Tensor>> pairs_;
  std::vector<std::pair<c10::StorageImpl*, c10::Storage>> made_;
  std::vector<std::string> strangers_;
  bool makes_ours_ = false;
  bool makes_new_ = false;
  bool makes_views_ = false;
  bool writes_ = false;
  bool waits_ = false;
};

// Whether the lists among the arguments have tensors of several devices.
bool mixes_lists(const c10::OperatorHandle& op, const Stack& stack) {
  std::set<bool> found;
  for (auto value = stack.end() - op.schema().arguments().size(); value != stack.end(); ++value) {
    if (!value->isTensorList()) continue;
    for (const auto& tensor : value->toTensorVector()) found.insert(is_ours(tensor));
  }
  return found.size() > 1;
}

void on_host(const c10::OperatorHandle& op, Stack* stack) {
  Below below;
  const bool is_on_lists = c10::toString(op.operator_name()).rfind("aten::_foreach_", 0) == 0;
  if (is_on_lists && mixes_lists(op, *stack)) {  // as CUDA's: one tensor after the other
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  } else {
    Call(op).run(stack);
  }
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  Below below;
  const bool leaves = !is_ours(to), comes = !is_ours(from);
  const auto source = comes ? from : seen_by_host(from);
  const auto target = leaves ? to : seen_by_host(to);
  target.copy_(source);
  const bool casts = from.scalar_type() != to.scalar_type();
  if (leaves) {
    const bool is_late = non_blocking && to.is_pinned();
    launch(is_late ? "copy to the host, not waited for" : "copy to the host");
    if (!is_late) wait_for_device("copy to the host");
  } else if (comes) {
    launch("copy from the host");
    if (!(non_blocking && from.is_pinned())) count("upload", "that the host waits for");
  } else {
    launch(casts ? "cast" : "copy");
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar read_number(const Tensor& tensor) {
  Below below;
  wait_for_device("number read");
  return at::_local_scalar_dense(seen_by_host(tensor));
}

c10::OperatorHandle operator_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

// torch has these two for devices like this one; on CUDA it calls the others.
void convolve(const c10::OperatorHandle&, Stack* stack) {
  static const auto op = operator_named("aten::convolution");
  on_host(op, stack);
}

void convolve_backward(const c10::OperatorHandle& overrideable, Stack* stack) {
  static const auto op = operator_named("aten::convolution_backward");
  const auto begin = stack->size() - overrideable.schema().arguments().size();
  const auto weight = (*stack)[begin + 2].toTensor();
  const bool transposed = (*stack)[begin + 6].toBool();
  const auto groups = (*stack)[begin + 8].toInt();
  const auto channels = transposed ? weight.size(1) * groups : weight.size(0);
  stack->insert(stack->begin() + begin + 3, IValue(std::vector<int64_t>{channels}));
  on_host(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &read_number);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolve>());
  m.impl(
      "convolution_backward_overrideable",
      torch::CppFunction::makeFromBoxedFunction<&convolve_backward>());
  // CUDA has kernels of its own for these; for other devices torch puts them together from parts.
  for (const char* name : {"addr", "native_group_norm", "native_layer_norm"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_host>());
  }
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto text = c10::toString(name);
    if (text.rfind("aten::_foreach_", 0) == 0 && text.find("out") == std::string::npos) {
      m.impl(text.substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&on_host>());
    }
  }
}

}  // namespace

// Attention in one kernel where the CPU has one.
int64_t choose_attention(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const std::optional<Tensor>& mask, double dropout, bool is_causal,
    std::optional<double> scale, bool is_grouped) {
  Below below;
  auto host = [](const Tensor& tensor) { return is_ours(tensor) ? seen_by_host(tensor) : tensor; };
  return at::_fused_sdp_choice(
      host(query), host(key), host(value), mask ? std::optional(host(*mask)) : mask, dropout,
      is_causal, scale, is_grouped);
}

}  // namespace fake

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &fake::choose_attention);
}
