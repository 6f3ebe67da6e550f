// One open file with whole transfers, and the small-file and folder operations
// of a commit. Not a stream: every transfer names its offset.
#ifndef PLAIT_CSRC_FILE_HPP_
#define PLAIT_CSRC_FILE_HPP_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>

#include "io.hpp"

namespace plait {

// What direct I/O asks of addresses, lengths and offsets: the page, which no
// block device or file system of today exceeds (where one does, EINVAL leads
// to buffered I/O).
constexpr size_t kDirectAlignment = 4096;

constexpr uint64_t round_up(uint64_t value, uint64_t quantum) {
  return (value + quantum - 1) / quantum * quantum;
}

// Throws std::invalid_argument, naming the call, for blocks that direct I/O does
// not take and for no threads.
void check_transfer(const std::string& call, uint64_t block_bytes, int threads);

// Owns a descriptor. Transfers may run in several threads at once; the other
// methods belong to the owner. Interrupted and short transfers go on until all
// bytes moved; any other failure throws std::system_error naming the operation
// and the path. close() must be called to learn of a late failure; the
// destructor only releases.
class File {
 public:
  File(Io& io, std::string path, int flags, mode_t mode = 0);
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  // Asks for direct I/O; false, with fallback_reason() set, where refused.
  bool try_direct();
  bool direct() const { return direct_; }
  // Why the file is buffered although direct I/O was asked for, or empty.
  std::string fallback_reason() const;

  // While direct(), `data` and `bytes` and `offset` must be aligned. A file
  // system that refuses a direct transfer turns the file to buffered I/O.
  void write_at(const void* data, size_t bytes, uint64_t offset);
  // Reads until `bytes` are there or the file ends; asks for `capacity` bytes,
  // which is `bytes` rounded up for direct I/O. Returns min(read, bytes).
  size_t read_at(void* data, size_t bytes, size_t capacity, uint64_t offset);

  uint64_t size() const;
  // True when nothing else refers to the file, which is open for writing.
  bool is_sole() const;
  // True when a processor copies what is written: into the page cache, or into
  // a file system that is memory, where direct I/O is accepted and means nothing.
  bool is_copied() const;
  // Reserves space, so that a full disk fails before any byte moves. A file
  // system that cannot reserve is left as it is.
  void allocate(uint64_t bytes);
  void truncate(uint64_t bytes);
  void sync();
  void sync_data();
  void close();
  const std::string& path() const { return path_; }
  int descriptor() const { return fd_; }

 private:
  void leave_direct(const char* operation, int error);

  Io& io_;
  const std::string path_;
  int fd_ = -1;
  std::atomic<bool> direct_{false};
  mutable std::mutex mutex_;  // Guards fallback_reason_ and its one writer.
  std::string fallback_reason_;
};

// Writes a whole new file of mode 0600, syncs and closes it. With `exclusive`
// an existing file is an error, else it is replaced in place. A file that this
// call created and could not finish is removed again.
void write_small(Io& io, const std::string& path, std::string_view data,
                 bool exclusive);
// Returns the whole file; throws EFBIG when it is larger than `max_bytes`.
std::string read_small(Io& io, const std::string& path, uint64_t max_bytes);

}  // namespace plait

#endif  // PLAIT_CSRC_FILE_HPP_
