// The system calls that a snapshot depends on, as an interface, so that a test
// can make any of them fail. Not a file abstraction: see file.hpp.
//
// Every method is one attempt of one call and returns >= 0 or -errno; loops
// for interrupts and short transfers belong to the callers.
#ifndef PLAIT_CSRC_IO_HPP_
#define PLAIT_CSRC_IO_HPP_

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace plait {

// Thread rule: every method may be called from any thread at any time.
class Io {
 public:
  virtual ~Io() = default;

  virtual int64_t open(const std::string& path, int flags, mode_t mode) = 0;
  // Turns O_DIRECT of an open file on or off; -EINVAL where unsupported.
  // (Not a flag of open: with O_CREAT a refused O_DIRECT leaves the file.)
  virtual int64_t set_direct(int fd, bool on) = 0;
  virtual int64_t file_size(int fd) = 0;
  // 1 when the open descriptor is all that refers to a plain file of ours: it
  // has one name and mode 0600, and nobody else has it open or mapped. 0 where
  // that is not so, or where the file system cannot tell.
  virtual int64_t is_sole(int fd) = 0;
  // 1 when from now on whoever would change the file that is open for reading
  // waits until F_SETLEASE gives the lease back; 0 where none is to be had.
  virtual int64_t lease(int fd) = 0;
  virtual int64_t pwrite(int fd, const void* data, size_t bytes,
                         uint64_t offset) = 0;
  virtual int64_t pread(int fd, void* data, size_t bytes, uint64_t offset) = 0;
  virtual int64_t fsync(int fd) = 0;
  virtual int64_t fdatasync(int fd) = 0;
  virtual int64_t ftruncate(int fd, uint64_t bytes) = 0;
  virtual int64_t fallocate(int fd, uint64_t bytes) = 0;
  // The descriptor is gone afterwards, whatever the result.
  virtual int64_t close(int fd) = 0;

  virtual int64_t rename(const std::string& from, const std::string& to) = 0;
  virtual int64_t unlink(const std::string& path) = 0;
  virtual int64_t mkdir(const std::string& path) = 0;
  virtual int64_t rmdir(const std::string& path) = 0;
  virtual int64_t fsync_dir(const std::string& path) = 0;
  // Bytes that an ordinary user may still write (statvfs).
  virtual int64_t free_bytes(const std::string& path) = 0;
};

// The kernel's own calls. Stateless.
class PosixIo final : public Io {
 public:
  int64_t open(const std::string& path, int flags, mode_t mode) override;
  int64_t set_direct(int fd, bool on) override;
  int64_t file_size(int fd) override;
  int64_t is_sole(int fd) override;
  int64_t lease(int fd) override;
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
};

}  // namespace plait

#endif  // PLAIT_CSRC_IO_HPP_
