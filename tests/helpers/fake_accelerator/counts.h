// What the fake accelerator was asked to do, by kind and name.
#pragma once

#include <cstdint>
#include <string>

namespace fake {

// Counts one event.
void count(const char* kind, const std::string& name);

// Work was given to the device: what was recorded before it has happened by now.
void launch(const std::string& name);

// The host waited for the device.  An error while a graph is captured, as on CUDA.
void wait_for_device(const std::string& why);

// How often work was given to the device.
uint64_t launches();

}  // namespace fake
