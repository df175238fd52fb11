#include "timeline.h"

#include <c10/util/StringUtil.h>

#include <algorithm>

namespace fake_accelerator {

namespace {

void advance(Clock& clock, const Clock& other) {
  for (const auto& [stream, step] : other) {
    auto& own = clock[stream];
    own = std::max(own, step);
  }
}

bool has_seen(const Clock& clock, c10::Stream stream, uint64_t step) {
  const auto it = clock.find(stream);
  return it != clock.end() && it->second >= step;
}

std::string name(c10::Stream stream) {
  return c10::str(stream.device(), "/", stream.id());
}

} // namespace

Timeline& Timeline::get() {
  // Leaked: tensors with static storage are freed after any static object.
  static auto* timeline = new Timeline();
  return *timeline;
}

void Timeline::check(
    const std::string& kernel,
    const std::string& access,
    const Clock& earlier,
    c10::Stream stream,
    const Clock& seen) {
  for (const auto& [other, step] : earlier) {
    if (!has_seen(seen, other, step)) {
      races_.push_back(c10::str(
          kernel,
          " on ",
          name(stream),
          " does not wait for ",
          access,
          " on ",
          name(other)));
    }
  }
}

void Timeline::launch(
    const std::string& kernel,
    c10::Stream stream,
    const std::vector<Memory*>& read,
    const std::vector<Memory*>& written) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& clock = streams_[stream];
  advance(clock, host_);
  const auto step = ++clock[stream];
  for (auto* memory : read) {
    check(kernel, "a write", memory->writes, stream, clock);
    memory->reads[stream] = step;
  }
  for (auto* memory : written) {
    check(kernel, "a write", memory->writes, stream, clock);
    check(kernel, "a read", memory->reads, stream, clock);
    memory->writes[stream] = step;
  }
}

void Timeline::use(Memory& memory, c10::Stream stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  memory.recorded.insert(stream);
}

void Timeline::free(const Memory& memory) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // A caching allocator hands the memory out again to its owner, in order, and
  // holds it back only for the streams that were recorded.
  auto seen = streams_[memory.owner];
  advance(seen, host_);
  for (const auto& stream : memory.recorded) {
    advance(seen, streams_[stream]);
  }
  check("free", "a write", memory.writes, memory.owner, seen);
  check("free", "a read", memory.reads, memory.owner, seen);
}

Event Timeline::record(c10::Stream stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto clock = streams_[stream];
  advance(clock, host_);
  return {stream, clock};
}

void Timeline::wait(c10::Stream stream, const Event& event) {
  const std::lock_guard<std::mutex> lock(mutex_);
  waits_.push_back(c10::str(name(stream), " waits for ", name(event.stream)));
  if (!ignore_waits_) {
    advance(streams_[stream], event.clock);
  }
}

void Timeline::wait_on_host(const Event& event) {
  const std::lock_guard<std::mutex> lock(mutex_);
  advance(host_, event.clock);
}

bool Timeline::reached_host(const Event& event) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::all_of(
      event.clock.begin(), event.clock.end(), [&](const auto& entry) {
        return has_seen(host_, entry.first, entry.second);
      });
}

std::vector<std::string> Timeline::races() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return races_;
}

std::vector<std::string> Timeline::waits() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return waits_;
}

void Timeline::ignore_waits(bool ignore) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ignore_waits_ = ignore;
}

void Timeline::reset() {
  const std::lock_guard<std::mutex> lock(mutex_);
  races_.clear();
  waits_.clear();
}

} // namespace fake_accelerator
