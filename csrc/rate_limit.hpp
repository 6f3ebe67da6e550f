// Spreads bytes over time. Not fair between threads, only slow enough in sum.
#ifndef PLAIT_CSRC_RATE_LIMIT_HPP_
#define PLAIT_CSRC_RATE_LIMIT_HPP_

#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>

namespace plait {

// Lets take(n) return no earlier than the bytes taken before allow at
// `bytes_per_s`; 0 never waits. Thread-safe by `mutex_`.
class RateLimit {
 public:
  explicit RateLimit(uint64_t bytes_per_s) : bytes_per_s_(bytes_per_s) {}

  void take(uint64_t bytes) {
    if (bytes_per_s_ == 0) {
      return;
    }
    Clock::time_point start;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      start = next_;
      next_ += std::chrono::duration_cast<Clock::duration>(
          std::chrono::duration<double>(static_cast<double>(bytes) /
                                        static_cast<double>(bytes_per_s_)));
    }
    std::this_thread::sleep_until(start);
  }

 private:
  using Clock = std::chrono::steady_clock;

  const uint64_t bytes_per_s_;
  std::mutex mutex_;  // Guards next_: when the next bytes may start.
  Clock::time_point next_ = Clock::now();
};

}  // namespace plait

#endif  // PLAIT_CSRC_RATE_LIMIT_HPP_
