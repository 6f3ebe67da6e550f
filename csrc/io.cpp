#include "io.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

namespace plait {
namespace {

int64_t result(int64_t value) { return value < 0 ? -errno : value; }

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
  return static_cast<int64_t>(info.f_bavail) *
         static_cast<int64_t>(info.f_frsize);
}

}  // namespace plait
