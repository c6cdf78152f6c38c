// Memory of the device, and the memory of the host that it is.
#pragma once

#include <c10/core/Storage.h>

namespace fake {

constexpr auto DEVICE = c10::DeviceType::PrivateUse1;

// What a pointer to memory of the device owns.
struct Block {
  c10::Storage host;
  size_t bytes;
  c10::DataPtr owner;  // of memory that came from elsewhere, else empty
};

// A pointer to memory of the device that is `host`.
c10::DataPtr pointer_to(const c10::Storage& host);

// The memory of the host that a storage of the device is.
const c10::Storage& host_memory(const c10::Storage& storage);

c10::Storage new_host_memory(size_t bytes);

}  // namespace fake
