// A device whose memory is memory of the host: allocator, streams, events, hooks.
//
// The host never really waits, but everything that would make it wait is counted.  An event
// that was recorded is over once more work was launched after it, or when something waits.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <sstream>

#include "counts.h"
#include "memory.h"

namespace fake {

namespace {

std::mutex counts_lock;
std::map<std::string, int64_t> counted;
std::atomic<uint64_t> launched{0};
std::atomic<uint64_t> finished{0};  // all work that was launched before this was waited for
std::atomic<bool> capturing{false};

std::mutex memory_lock;
c10::CachingDeviceAllocator::DeviceStats statistics;
std::set<const void*> pinned;

void note_memory(int64_t bytes) {
  std::lock_guard<std::mutex> held(memory_lock);
  for (auto* figures : {&statistics.allocated_bytes, &statistics.active_bytes,
                        &statistics.reserved_bytes, &statistics.requested_bytes}) {
    auto& all = (*figures)[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
    bytes > 0 ? all.increase(bytes) : all.decrease(-bytes);
  }
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  note_memory(-static_cast<int64_t>(block->bytes));
  delete block;
}

}  // namespace

void count(const char* kind, const std::string& name) {
  std::lock_guard<std::mutex> held(counts_lock);
  ++counted[std::string(kind) + " " + name];
}

void launch(const std::string& name) {
  ++launched;
  count("launch", name);
}

void wait_for_device(const std::string& why) {
  TORCH_CHECK(!capturing, why, ": the host waits for the device while a graph is captured");
  finished = launched.load();
  count("wait", why);
}

uint64_t launches() { return launched; }

c10::DataPtr pointer_to(const c10::Storage& host) {
  auto* block = new Block{host, host.nbytes(), {}};
  note_memory(static_cast<int64_t>(block->bytes));
  return {host.mutable_data(), block, &free_block, c10::Device(DEVICE, 0)};
}

// torch makes tensors of the device from bare pointers, when it writes old files.
const c10::Storage& adopted(const c10::Storage& storage) {
  c10::DataPtr bare(storage.mutable_data(), c10::Device(c10::DeviceType::CPU));
  c10::Storage host(
      c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(bare),
      c10::GetAllocator(c10::DeviceType::CPU), false);
  auto fresh = pointer_to(host);
  auto* block = static_cast<Block*>(fresh.get_context());
  block->owner = storage.set_data_ptr(std::move(fresh));
  return block->host;
}

const c10::Storage& host_memory(const c10::Storage& storage) {
  auto* block = storage.data_ptr().cast_context<Block>(&free_block);
  return block == nullptr ? adopted(storage) : block->host;
}

c10::Storage new_host_memory(size_t bytes) {
  return c10::Storage(
      c10::Storage::use_byte_size_t(), bytes, c10::GetAllocator(c10::DeviceType::CPU), true);
}

namespace {

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override { return pointer_to(new_host_memory(bytes)); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> held(memory_lock);
    return statistics;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> held(memory_lock);
    for (auto* figures : {&statistics.allocated_bytes, &statistics.active_bytes,
                          &statistics.reserved_bytes, &statistics.requested_bytes}) {
      for (auto& one : *figures) one.reset_peak();
    }
  }
};

Allocator allocator;
REGISTER_ALLOCATOR(DEVICE, &allocator);

void free_pinned(void* data) {
  {
    std::lock_guard<std::mutex> held(memory_lock);
    pinned.erase(data);
  }
  c10::free_cpu(data);
}

// Memory of the host that is known as pinned.
struct PinnedAllocator final : at::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::alloc_cpu(bytes);
    std::lock_guard<std::mutex> held(memory_lock);
    pinned.insert(data);
    return {data, data, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

PinnedAllocator pinned_allocator;

struct Event {
  uint64_t launched;
};

thread_local c10::StreamId current_stream = 0;
std::atomic<c10::StreamId> last_stream{0};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return DEVICE; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {DEVICE, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  static c10::Stream stream(c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(DEVICE, 0), id);
  }
  c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return stream(++last_stream);
  }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(++last_stream); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = stream(current_stream);
    current_stream = next.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override { return finished == launched; }
  void synchronizeStream(const c10::Stream&) const override { wait_for_device("stream"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { wait_for_device("device"); }
  bool isStreamCapturing(const c10::Stream&) const override { return capturing; }

  void record(void** event, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    destroyEvent(*event, 0);
    *event = new Event{launched};
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void* event) const override {
    TORCH_CHECK(!capturing, "an event is queried while a graph is captured");
    auto* found = static_cast<Event*>(event);
    return found == nullptr || launched > found->launched || finished >= found->launched;
  }
  void synchronizeEvent(void*) const override { wait_for_device("event"); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return static_cast<double>(
        static_cast<Event*>(second)->launched - static_cast<Event*>(first)->launched);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Random numbers are those of the host's generator, so that results can be compared.
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> held(memory_lock);
    return pinned.count(data) != 0;
  }
  c10::Device getDeviceFromPtr(void*) const override { return {DEVICE, 0}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<at::CPUGeneratorImpl>();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto fresh = new_host_memory(bytes);
    std::memcpy(fresh.mutable_data(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.set_data_ptr_noswap(pointer_to(fresh));
    storage.set_nbytes(bytes);
  }
};

[[maybe_unused]] const bool hooks_are_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace
}  // namespace fake

// Called through ctypes.

extern "C" const char* fake_counts() {
  static std::string text;
  std::ostringstream out;
  std::lock_guard<std::mutex> held(fake::counts_lock);
  for (const auto& [name, times] : fake::counted) out << times << ' ' << name << '\n';
  text = out.str();
  return text.c_str();
}

extern "C" void fake_forget_counts() {
  std::lock_guard<std::mutex> held(fake::counts_lock);
  fake::counted.clear();
}

extern "C" void fake_capture(bool on) { fake::capturing = on; }
