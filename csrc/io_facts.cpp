#include "io_facts.hpp"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "aligned_buffer.hpp"
#include "errors.hpp"

namespace plait {
namespace {

struct Magic {
  uint32_t number;
  const char* name;
};

// statfs(2) and linux/magic.h.
constexpr Magic kMagics[] = {
    {0xEF53, "ext4"},          {0x58465342, "xfs"},    {0x01021994, "tmpfs"},
    {0x794C7630, "overlayfs"}, {0x9123683E, "btrfs"},  {0x6969, "nfs"},
    {0x65735546, "fuse"},      {0x0BD00BD0, "lustre"}, {0x2FC12FC1, "zfs"},
    {0x01021997, "9p"},        {0xF2F52010, "f2fs"},   {0x47504653, "gpfs"},
    {0x00C36400, "ceph"},      {0xFF534D42, "cifs"},
};

std::string filesystem_name(uint32_t number) {
  for (const Magic& magic : kMagics) {
    if (magic.number == number) {
      return magic.name;
    }
  }
  char text[16];
  std::snprintf(text, sizeof(text), "0x%08x", number);
  return text;
}

// A file without a name, or one whose name is removed at once where the file
// system has no O_TMPFILE.
int open_nameless(const std::string& folder) {
  int fd = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL)) {
    std::string name = folder + "/.plait-probe-XXXXXX";
    fd = ::mkostemp(name.data(), O_CLOEXEC);
    if (fd >= 0) {
      ::unlink(name.c_str());
    }
  }
  if (fd < 0) {
    throw_errno(errno, "create a file in", folder);
  }
  return fd;
}

// Empty if a page can be written and read by direct I/O, else why not.
std::string try_direct(int fd) {
  if (::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_DIRECT) < 0) {
    return std::string("O_DIRECT refused: ") + std::strerror(errno);
  }
  AlignedBuffer page(kDirectAlignment);
  std::memset(page.data(), 0, kDirectAlignment);
  if (::pwrite(fd, page.data(), kDirectAlignment, 0) < 0) {
    return std::string("direct pwrite refused: ") + std::strerror(errno);
  }
  if (::pread(fd, page.data(), kDirectAlignment, 0) < 0) {
    return std::string("direct pread refused: ") + std::strerror(errno);
  }
  return "";
}

std::string try_io_uring() {
#if defined(SYS_io_uring_setup)
  alignas(8) char params[120] = {};  // struct io_uring_params, all defaults.
  const long fd = ::syscall(SYS_io_uring_setup, 1, params);
  if (fd < 0) {
    return std::string("io_uring_setup: ") + std::strerror(errno);
  }
  ::close(static_cast<int>(fd));
  return "";
#else
  return "unknown when this was compiled";
#endif
}

}  // namespace

Facts io_facts(const std::string& path) {
  struct statfs kind = {};
  struct statvfs space = {};
  if (::statfs(path.c_str(), &kind) < 0 ||
      ::statvfs(path.c_str(), &space) < 0) {
    throw_errno(errno, "statfs", path);
  }
  const int fd = open_nameless(path);
  const std::string direct_io_reason = try_direct(fd);
  ::close(fd);
  const std::string io_uring_reason = try_io_uring();
  const uint64_t unit = space.f_frsize;
  return {
      {"direct_io", direct_io_reason.empty()},
      {"direct_io_reason", direct_io_reason},
      {"io_uring", io_uring_reason.empty()},
      {"io_uring_reason", io_uring_reason},
      {"filesystem", filesystem_name(static_cast<uint32_t>(kind.f_type))},
      {"free_bytes", uint64_t{space.f_bavail} * unit},
      {"total_bytes", uint64_t{space.f_blocks} * unit},
  };
}

}  // namespace plait
