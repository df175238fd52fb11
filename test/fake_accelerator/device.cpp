// What the engine asks of an accelerator: devices, streams, events, memory.

#include "timeline.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>

#include <array>
#include <atomic>
#include <memory>

namespace fake_accelerator {

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;
// New streams come from a pool, in turn, so that clocks stay small.
constexpr c10::StreamId kStreams = 8;

thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, kDevices> current_streams{};
std::atomic<c10::StreamId> streams_given{0};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override {
    return kType;
  }

  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }

  c10::Device getDevice() const override {
    return {kType, current_device};
  }

  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "There is no device ", device, ".");
    uncheckedSetDevice(device);
  }

  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index();
  }

  c10::Device exchangeDevice(c10::Device device) const override {
    const auto previous = getDevice();
    setDevice(device);
    return previous;
  }

  c10::Stream getStream(c10::Device device) const noexcept override {
    const auto index = device.has_index() ? device.index() : current_device;
    return stream(index, current_streams[index]);
  }

  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(device.has_index() ? device.index() : current_device, 0);
  }

  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream(
        device.has_index() ? device.index() : current_device,
        1 + streams_given++ % kStreams);
  }

  c10::Stream exchangeStream(c10::Stream next) const noexcept override {
    const auto previous = getStream(next.device());
    current_streams[next.device_index()] = next.id();
    return previous;
  }

  void record(
      void** event,
      const c10::Stream& stream,
      const c10::DeviceIndex device,
      const c10::EventFlag) const override {
    destroyEvent(*event, device);
    *event = new Event(Timeline::get().record(stream));
  }

  void destroyEvent(void* event, const c10::DeviceIndex)
      const noexcept override {
    delete static_cast<Event*>(event);
  }

  void block(void* event, const c10::Stream& stream) const override {
    if (event) {
      Timeline::get().wait(stream, *static_cast<Event*>(event));
    }
  }

  bool queryEvent(void* event) const override {
    return !event || Timeline::get().reached_host(*static_cast<Event*>(event));
  }

  void synchronizeEvent(void* event) const override {
    if (event) {
      Timeline::get().wait_on_host(*static_cast<Event*>(event));
    }
  }

  bool queryStream(const c10::Stream& stream) const override {
    return Timeline::get().reached_host(Timeline::get().record(stream));
  }

  void synchronizeStream(const c10::Stream& stream) const override {
    Timeline::get().wait_on_host(Timeline::get().record(stream));
  }

  void synchronizeDevice(const c10::DeviceIndex device) const override {
    for (c10::StreamId id = 0; id <= kStreams; ++id) {
      synchronizeStream(stream(device, id));
    }
  }

  void recordDataPtrOnStream(
      const c10::DataPtr& pointer,
      const c10::Stream& stream) const override {
    if (auto* memory = static_cast<Memory*>(pointer.get_context())) {
      Timeline::get().use(*memory, stream);
    }
  }

 private:
  static c10::Stream stream(c10::DeviceIndex device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Host memory that carries its history as the context of its pointer.
class HostAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const Guard guard;
    auto block = std::make_unique<Block>(
        Block{{guard.getStream(guard.getDevice())}, c10::alloc_cpu(bytes)});
    auto* data = block->data;
    return {data, block.release(), &HostAllocator::free, guard.getDevice()};
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  struct Block : Memory {
    Block(Memory memory, void* bytes)
        : Memory(std::move(memory)), data(bytes) {}
    void* data;
  };

  static void free(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    Timeline::get().free(*block);
    c10::free_cpu(block->data);
  }
};

HostAllocator allocator;
REGISTER_ALLOCATOR(kType, &allocator)

struct Hooks final : public at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
};

const auto hooks_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

} // namespace

} // namespace fake_accelerator
