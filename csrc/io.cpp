#include "io.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <limits>

namespace plait {
namespace {

int64_t result(int64_t value) { return value < 0 ? -errno : value; }

// File systems of this machine alone on which a lease knows of every opener
// and mapping (tried on ext4 and tmpfs). Not overlayfs, where a mapping
// outlives its descriptor unseen (tried), and none that other machines share.
bool knows_openers(uint32_t magic) {
  return magic == 0xEF53 || magic == 0x58465342 || magic == TMPFS_MAGIC;
}

}  // namespace

int64_t PosixIo::open(const std::string& path, int flags, mode_t mode) {
  return result(::open(path.c_str(), flags | O_CLOEXEC, mode));
}

int64_t PosixIo::set_direct(int fd, bool on) {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0) {
    return -errno;
  }
  return result(
      ::fcntl(fd, F_SETFL, on ? flags | O_DIRECT : flags & ~O_DIRECT));
}

int64_t PosixIo::file_size(int fd) {
  struct stat info = {};
  return ::fstat(fd, &info) < 0 ? -errno : static_cast<int64_t>(info.st_size);
}

// The kernel grants a lease for writing only while no other open file refers to
// the inode, and a mapping keeps its open file. The lease goes back at once:
// whoever opens the file meanwhile waits for that, and the signal that tells us
// of him is one that is ignored unless asked for (SIGIO would end the process).
int64_t PosixIo::is_sole(int fd) {
  struct stat info = {};
  struct statfs kind = {};
  if (::fstat(fd, &info) < 0 || ::fstatfs(fd, &kind) < 0) {
    return -errno;
  }
  const bool is_ours = S_ISREG(info.st_mode) && info.st_nlink == 1 &&
                       info.st_uid == ::geteuid() &&
                       (info.st_mode & 07777) == 0600;
  if (!is_ours || !knows_openers(static_cast<uint32_t>(kind.f_type)) ||
      ::fcntl(fd, F_SETSIG, SIGURG) < 0 ||
      ::fcntl(fd, F_SETLEASE, F_WRLCK) < 0) {
    return 0;
  }
  return ::fcntl(fd, F_SETLEASE, F_UNLCK) < 0 ? -errno : 1;
}

// The kernel grants it while nobody has the file open for writing. Not asked
// for in tmpfs, whose pages of 4 KiB cost more to map than to copy.
int64_t PosixIo::lease(int fd) {
  struct statfs kind = {};
  return ::fstatfs(fd, &kind) == 0 && kind.f_type != TMPFS_MAGIC &&
         knows_openers(static_cast<uint32_t>(kind.f_type)) &&
         ::fcntl(fd, F_SETSIG, SIGURG) == 0 &&
         ::fcntl(fd, F_SETLEASE, F_RDLCK) == 0;
}

int64_t PosixIo::pwrite(int fd, const void* data, size_t bytes,
                        uint64_t offset) {
  return result(::pwrite(fd, data, bytes, static_cast<off_t>(offset)));
}

int64_t PosixIo::pread(int fd, void* data, size_t bytes, uint64_t offset) {
  return result(::pread(fd, data, bytes, static_cast<off_t>(offset)));
}

int64_t PosixIo::fsync(int fd) { return result(::fsync(fd)); }

int64_t PosixIo::fdatasync(int fd) { return result(::fdatasync(fd)); }

int64_t PosixIo::ftruncate(int fd, uint64_t bytes) {
  return result(::ftruncate(fd, static_cast<off_t>(bytes)));
}

// Not posix_fallocate: glibc emulates it by writing a byte per block where the
// file system cannot allocate.
int64_t PosixIo::fallocate(int fd, uint64_t bytes) {
  return result(::fallocate(fd, 0, 0, static_cast<off_t>(bytes)));
}

int64_t PosixIo::close(int fd) { return result(::close(fd)); }

int64_t PosixIo::rename(const std::string& from, const std::string& to) {
  return result(::rename(from.c_str(), to.c_str()));
}

int64_t PosixIo::unlink(const std::string& path) {
  return result(::unlink(path.c_str()));
}

int64_t PosixIo::mkdir(const std::string& path) {
  return result(::mkdir(path.c_str(), 0777));
}

int64_t PosixIo::rmdir(const std::string& path) {
  return result(::rmdir(path.c_str()));
}

int64_t PosixIo::fsync_dir(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) {
    return -errno;
  }
  const int64_t synced = result(::fsync(fd));
  ::close(fd);  // Nothing was written through it, so nothing can be lost.
  return synced;
}

int64_t PosixIo::free_bytes(const std::string& path) {
  struct statvfs info = {};
  if (::statvfs(path.c_str(), &info) < 0) {
    return -errno;
  }
  // A file system that knows no size (ramfs, one in user space) says 0 blocks,
  // one without an end more than can be counted: writing will tell.
  int64_t bytes = 0;
  if (info.f_blocks == 0 ||
      __builtin_mul_overflow(info.f_bavail, info.f_frsize, &bytes)) {
    return std::numeric_limits<int64_t>::max();
  }
  return bytes;
}

}  // namespace plait
