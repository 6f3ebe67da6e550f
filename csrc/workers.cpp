#include "workers.hpp"

#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace plait {
namespace {

// Leaves signals to the threads that the program itself started, where Python
// handles them; a fault of our own still ends the process at its place.
void block_signals() {
  sigset_t all;
  sigfillset(&all);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) {
    sigdelset(&all, fault);
  }
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

}  // namespace

void lower_priority(const Priority& priority) {
  constexpr int kIoprioWhoProcess = 1;
  constexpr int kBestEffortLowest = (2 << 13) | 7;
  constexpr int kIdle = 3 << 13;
  if (priority.nice > 0) {
    const auto thread = static_cast<id_t>(::syscall(SYS_gettid));
    ::setpriority(PRIO_PROCESS, thread, priority.nice);
  }
  if (priority.io != IoPriority::kNormal) {
    const bool idle = priority.io == IoPriority::kIdle;
    ::syscall(SYS_ioprio_set, kIoprioWhoProcess, 0,
              idle ? kIdle : kBestEffortLowest);
  }
}

Workers::Workers(int count, const std::string& name, uint64_t num_tasks,
                 Body body, const Priority& priority)
    : num_tasks_(num_tasks), body_(std::move(body)) {
  const uint64_t useful = std::min(num_tasks, static_cast<uint64_t>(count));
  threads_.reserve(useful);
  try {
    for (uint64_t i = 0; i < useful; ++i) {
      threads_.emplace_back(&Workers::run, this, static_cast<int>(i), name,
                            priority);
    }
  } catch (...) {  // No thread left to start: stop the ones that run.
    failed_ = true;
    join();
    throw;
  }
}

Workers::~Workers() {
  failed_ = true;  // After close() there is nothing left to stop.
  join();
}

void Workers::join() {
  for (std::thread& thread : threads_) {
    thread.join();
  }
  threads_.clear();
}

void Workers::close() {
  join();
  if (error_) {
    std::rethrow_exception(std::exchange(error_, nullptr));
  }
}

void Workers::run(int worker, const std::string& name, const Priority& priority) {
  block_signals();
  pthread_setname_np(pthread_self(),
                     (name + "-" + std::to_string(worker)).c_str());
  lower_priority(priority);
  while (!failed_) {
    const uint64_t task = next_task_.fetch_add(1);
    if (task >= num_tasks_) {
      return;
    }
    try {
      body_(worker, task);
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!error_) {
        error_ = std::current_exception();
      }
      failed_ = true;
    }
  }
}

}  // namespace plait
