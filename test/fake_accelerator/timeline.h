#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace fake_accelerator {

// The number of the last step seen of each stream.
using Clock = std::unordered_map<c10::Stream, uint64_t>;

// One allocation: the stream it belongs to, the last step of each stream that
// read and that wrote it, and the streams the allocator was told about.
struct Memory {
  c10::Stream owner;
  Clock reads{};
  Clock writes{};
  std::unordered_set<c10::Stream> recorded{};
};

struct Event {
  c10::Stream stream;
  Clock clock;
};

// Note [A race without a delay]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Kernels of the pretend devices run on the host, at once, so a synchronisation
// that is missing never shows in a value. It shows here: each stream has a
// vector clock, which waiting for an event or for the host advances, and two
// accesses to one allocation conflict unless one has been seen by the clock of
// the stream that makes the other. That treats each kernel as running for as
// long as nothing waits for it, which is the worst a real device could do, and
// finds the same races on every run.
//
// All threads share the host's clock: what one of them has waited for is taken
// as seen by each kernel launched later. Races between threads of the host are
// for a thread sanitizer.
class Timeline {
 public:
  static Timeline& get();

  void launch(
      const std::string& kernel,
      c10::Stream stream,
      const std::vector<Memory*>& read,
      const std::vector<Memory*>& written);
  void use(Memory& memory, c10::Stream stream);
  void free(const Memory& memory);

  Event record(c10::Stream stream);
  void wait(c10::Stream stream, const Event& event);
  void wait_on_host(const Event& event);
  bool reached_host(const Event& event);

  std::vector<std::string> races();
  std::vector<std::string> waits();
  void ignore_waits(bool ignore);
  void reset();

 private:
  void check(
      const std::string& kernel,
      const std::string& access,
      const Clock& earlier,
      c10::Stream stream,
      const Clock& seen);

  std::mutex mutex_;
  std::unordered_map<c10::Stream, Clock> streams_;
  Clock host_;
  bool ignore_waits_ = false;
  std::vector<std::string> races_;
  std::vector<std::string> waits_;
};

} // namespace fake_accelerator
