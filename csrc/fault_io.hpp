// An Io that fails on command. For tests only; production never makes one.
#ifndef PLAIT_CSRC_FAULT_IO_HPP_
#define PLAIT_CSRC_FAULT_IO_HPP_

#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "io.hpp"

namespace plait {

// Numbers every operation from 0 in one sequence, passes it to a PosixIo and
// applies the script's action to the operations that it names:
//   errno N         the operation is not done and returns errno N
//                   (close still closes, as the kernel does)
//   short N         pwrite and pread transfer at most N bytes
//   crash_before 0  the process ends (_exit 137) instead of the operation
//   crash_after 0   the process ends right after the operation
//   crash_short N   a pwrite writes at most N bytes, then the process ends
// With `sticky`, an errno action also hits all later operations, or only those
// named in `only`. One thread issuing operations gives one fixed numbering.
// Owns its log and script; thread-safe by `mutex_`.
class FaultIo final : public Io {
 public:
  using Script = std::vector<std::tuple<uint64_t, std::string, int64_t>>;
  using Names = std::vector<std::string>;

  // Throws std::invalid_argument for an unknown action.
  FaultIo(const Script& script, bool sticky, Names only);

  // (name, path) of every operation so far; a rename's path is "from -> to".
  std::vector<std::pair<std::string, std::string>> ops() const;

  int64_t open(const std::string& path, int flags, mode_t mode) override;
  int64_t set_direct(int fd, bool on) override;
  int64_t file_size(int fd) override;
  int64_t is_sole(int fd) override;
  // Refused: what is read through a mapping makes no call that could fail.
  int64_t lease(int) override { return 0; }
  int64_t pwrite(int fd, const void* data, size_t bytes,
                 uint64_t offset) override;
  int64_t pread(int fd, void* data, size_t bytes, uint64_t offset) override;
  int64_t fsync(int fd) override;
  int64_t fdatasync(int fd) override;
  int64_t ftruncate(int fd, uint64_t bytes) override;
  int64_t fallocate(int fd, uint64_t bytes) override;
  int64_t close(int fd) override;
  int64_t rename(const std::string& from, const std::string& to) override;
  int64_t unlink(const std::string& path) override;
  int64_t mkdir(const std::string& path) override;
  int64_t rmdir(const std::string& path) override;
  int64_t fsync_dir(const std::string& path) override;
  int64_t free_bytes(const std::string& path) override;

 private:
  enum class Action { kNone, kErrno, kShort, kCrashAfter, kCrashShort };
  struct Fault {
    Action action = Action::kNone;
    int64_t value = 0;
  };

  // Logs the operation and says what shall happen to it; may end the process.
  Fault next(const char* name, const std::string& path);
  template <typename Call>
  int64_t run(const char* name, const std::string& path, Call call);
  std::string path_of(int fd) const;

  PosixIo posix_;
  const bool sticky_;
  const Names only_;
  mutable std::mutex mutex_;  // Guards everything below.
  std::map<uint64_t, std::pair<std::string, int64_t>> script_;
  std::vector<std::pair<std::string, std::string>> ops_;
  std::map<int, std::string> paths_;
  int64_t sticky_errno_ = 0;
};

}  // namespace plait

#endif  // PLAIT_CSRC_FAULT_IO_HPP_
