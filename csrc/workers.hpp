// Threads for one piece of work. Not a pool: they live as long as the object.
#ifndef PLAIT_CSRC_WORKERS_HPP_
#define PLAIT_CSRC_WORKERS_HPP_

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace plait {

enum class IoPriority { kNormal, kLow, kIdle };

// Below that of training. Lowering one's own needs no right and cannot fail in
// a way that matters: the work is the same at any priority. I/O priorities act
// where the disk's scheduler knows them (bfq; mq-deadline knows classes).
struct Priority {
  int nice = 0;  // 0 leaves it as it is.
  IoPriority io = IoPriority::kNormal;
};

constexpr int kBackgroundNice = 10;

// Of the calling thread.
void lower_priority(const Priority& priority);

// Owns `count` threads (not more than tasks) named `name`-0, `name`-1, ...
// which take the tasks 0 .. num_tasks-1 in order and call body(worker, task).
// After the first error no further task starts; close() joins and throws that
// error, the destructor only joins. Signals are left to the program's own
// threads.
class Workers {
 public:
  using Body = std::function<void(int worker, uint64_t task)>;

  Workers(int count, const std::string& name, uint64_t num_tasks, Body body,
          const Priority& priority = {});
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  void close();

 private:
  void run(int worker, const std::string& name, const Priority& priority);
  void join();

  const uint64_t num_tasks_;
  const Body body_;
  std::atomic<uint64_t> next_task_{0};
  std::atomic<bool> failed_{false};
  std::mutex mutex_;  // Guards error_ while threads run.
  std::exception_ptr error_;
  std::vector<std::thread> threads_;
};

}  // namespace plait

#endif  // PLAIT_CSRC_WORKERS_HPP_
