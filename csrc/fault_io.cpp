#include "fault_io.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>

namespace plait {
namespace {

constexpr int kCrashStatus = 137;  // What a shell reports after kill -9.

// The real effect of a transfer cut to `bytes`. Direct I/O refuses odd lengths,
// so there only whole sectors move; the reported count stays as scripted.
template <typename Transfer>
int64_t cut_transfer(size_t bytes, Transfer transfer) {
  constexpr size_t kSector = 512;
  int64_t moved = transfer(bytes);
  if (moved == -EINVAL) {
    const size_t whole = bytes / kSector * kSector;
    moved = whole == 0 ? 0 : transfer(whole);
    return moved < 0 ? moved : static_cast<int64_t>(bytes);
  }
  return moved;
}

}  // namespace

FaultIo::FaultIo(const Script& script, bool sticky, Names only)
    : sticky_(sticky), only_(std::move(only)) {
  const Names known = {"errno", "short", "crash_before", "crash_after",
                       "crash_short"};
  for (const auto& [index, action, value] : script) {
    if (std::find(known.begin(), known.end(), action) == known.end()) {
      throw std::invalid_argument(
          "FaultIo action '" + action +
          "': must be errno, short, crash_before, crash_after or crash_short");
    }
    script_[index] = {action, value};
  }
}

std::vector<std::pair<std::string, std::string>> FaultIo::ops() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return ops_;
}

FaultIo::Fault FaultIo::next(const char* name, const std::string& path) {
  std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t index = ops_.size();
  ops_.emplace_back(name, path);
  const auto step = script_.find(index);
  if (step == script_.end()) {
    const bool hit = only_.empty() ||
                     std::find(only_.begin(), only_.end(), name) != only_.end();
    return sticky_errno_ != 0 && hit ? Fault{Action::kErrno, sticky_errno_}
                                     : Fault{};
  }
  const auto& [action, value] = step->second;
  if (action == "crash_before") {
    ::_exit(kCrashStatus);
  }
  if (action == "errno") {
    sticky_errno_ = sticky_ ? value : 0;
    return {Action::kErrno, value};
  }
  if (action == "short") {
    return {Action::kShort, value};
  }
  return {action == "crash_short" ? Action::kCrashShort : Action::kCrashAfter,
          value};
}

template <typename Call>
int64_t FaultIo::run(const char* name, const std::string& path, Call call) {
  const Fault fault = next(name, path);
  if (fault.action == Action::kErrno) {
    return -fault.value;
  }
  const int64_t result = call();
  if (fault.action == Action::kCrashAfter ||
      fault.action == Action::kCrashShort) {
    ::_exit(kCrashStatus);
  }
  return result;
}

std::string FaultIo::path_of(int fd) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = paths_.find(fd);
  return found == paths_.end() ? std::string() : found->second;
}

int64_t FaultIo::open(const std::string& path, int flags, mode_t mode) {
  const int64_t fd =
      run("open", path, [&] { return posix_.open(path, flags, mode); });
  if (fd >= 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    paths_[static_cast<int>(fd)] = path;
  }
  return fd;
}

int64_t FaultIo::set_direct(int fd, bool on) {
  return run("set_direct", path_of(fd),
             [&] { return posix_.set_direct(fd, on); });
}

int64_t FaultIo::file_size(int fd) {
  return run("file_size", path_of(fd), [&] { return posix_.file_size(fd); });
}

int64_t FaultIo::is_sole(int fd) {
  return run("is_sole", path_of(fd), [&] { return posix_.is_sole(fd); });
}

int64_t FaultIo::pwrite(int fd, const void* data, size_t bytes,
                        uint64_t offset) {
  const Fault fault = next("pwrite", path_of(fd));
  if (fault.action == Action::kErrno) {
    return -fault.value;
  }
  const bool cut =
      fault.action == Action::kShort || fault.action == Action::kCrashShort;
  const size_t most =
      cut ? std::min(bytes, static_cast<size_t>(fault.value)) : bytes;
  const auto transfer = [&](size_t n) {
    return posix_.pwrite(fd, data, n, offset);
  };
  const int64_t result = cut ? cut_transfer(most, transfer) : transfer(most);
  if (fault.action == Action::kCrashAfter ||
      fault.action == Action::kCrashShort) {
    ::_exit(kCrashStatus);
  }
  return result;
}

int64_t FaultIo::pread(int fd, void* data, size_t bytes, uint64_t offset) {
  const Fault fault = next("pread", path_of(fd));
  if (fault.action == Action::kErrno) {
    return -fault.value;
  }
  const auto transfer = [&](size_t n) {
    return posix_.pread(fd, data, n, offset);
  };
  const int64_t result =
      fault.action == Action::kShort
          ? cut_transfer(std::min(bytes, static_cast<size_t>(fault.value)),
                         transfer)
          : transfer(bytes);
  if (fault.action == Action::kCrashAfter ||
      fault.action == Action::kCrashShort) {
    ::_exit(kCrashStatus);
  }
  return result;
}

int64_t FaultIo::fsync(int fd) {
  return run("fsync", path_of(fd), [&] { return posix_.fsync(fd); });
}

int64_t FaultIo::fdatasync(int fd) {
  return run("fdatasync", path_of(fd), [&] { return posix_.fdatasync(fd); });
}

int64_t FaultIo::ftruncate(int fd, uint64_t bytes) {
  return run("ftruncate", path_of(fd),
             [&] { return posix_.ftruncate(fd, bytes); });
}

int64_t FaultIo::fallocate(int fd, uint64_t bytes) {
  return run("fallocate", path_of(fd),
             [&] { return posix_.fallocate(fd, bytes); });
}

int64_t FaultIo::close(int fd) {
  const std::string path = path_of(fd);
  const Fault fault = next("close", path);
  const int64_t result = posix_.close(fd);
  if (fault.action == Action::kCrashAfter ||
      fault.action == Action::kCrashShort) {
    ::_exit(kCrashStatus);
  }
  return fault.action == Action::kErrno ? -fault.value : result;
}

int64_t FaultIo::rename(const std::string& from, const std::string& to) {
  return run("rename", from + " -> " + to,
             [&] { return posix_.rename(from, to); });
}

int64_t FaultIo::unlink(const std::string& path) {
  return run("unlink", path, [&] { return posix_.unlink(path); });
}

int64_t FaultIo::mkdir(const std::string& path) {
  return run("mkdir", path, [&] { return posix_.mkdir(path); });
}

int64_t FaultIo::rmdir(const std::string& path) {
  return run("rmdir", path, [&] { return posix_.rmdir(path); });
}

int64_t FaultIo::fsync_dir(const std::string& path) {
  return run("fsync_dir", path, [&] { return posix_.fsync_dir(path); });
}

int64_t FaultIo::free_bytes(const std::string& path) {
  return run("statvfs", path, [&] { return posix_.free_bytes(path); });
}

}  // namespace plait
