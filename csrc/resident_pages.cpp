#include "resident_pages.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <vector>

namespace plait {
namespace {

// A range of a file in the address space, which takes no memory of its own.
class Mapping {
 public:
  Mapping(int fd, uint64_t offset, uint64_t bytes)
      : bytes_(bytes),
        data_(::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd,
                     static_cast<off_t>(offset))) {}
  ~Mapping() {
    if (data_ != MAP_FAILED) {
      ::munmap(data_, bytes_);
    }
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  const char* data() const { return static_cast<const char*>(data_); }

  bool is_resident() const {
    if (data_ == MAP_FAILED) {
      return false;
    }
    std::vector<unsigned char> pages(round_up(bytes_, kDirectAlignment) /
                                     kDirectAlignment);
    return ::mincore(data_, bytes_, pages.data()) == 0 &&
           std::all_of(pages.begin(), pages.end(),
                       [](unsigned char page) { return page & 1; });
  }

  // Until it is unmapped. Refused above RLIMIT_MEMLOCK, and by a page that was
  // dropped meanwhile and that its disk does not give again.
  bool lock() const { return ::mlock(data_, bytes_) == 0; }

 private:
  const uint64_t bytes_;
  void* const data_;
};

// The kernel tells anybody else that a file is in memory, whether or not it is.
bool is_told(int fd) {
  struct stat info = {};
  return ::fstat(fd, &info) == 0 &&
         (info.st_uid == ::geteuid() ||
          ::faccessat(fd, "", W_OK, AT_EACCESS | AT_EMPTY_PATH) == 0);
}

}  // namespace

ResidentPages::ResidentPages(Io& io, const File& file)
    : fd_(file.descriptor()),
      is_told_(is_told(fd_)),
      leased_(io.lease(fd_) == 1) {}

bool ResidentPages::are_resident(uint64_t offset, uint64_t bytes) const {
  return is_told_ && Mapping(fd_, offset, bytes).is_resident();
}

// Asks for the lease where nothing is resident too: whoever waits for the file
// is let in between two blocks, however long the others take from a disk.
ResidentPages::Found ResidentPages::use(
    uint64_t offset, uint64_t bytes,
    const std::function<void(const char*)>& use) {
  const Mapping pages(fd_, offset, bytes);
  const bool resident = is_told_ && pages.is_resident();
  bool held = false;
  {
    std::shared_lock<std::shared_mutex> lock(mutex_);
    held = is_held();
    if (held && resident && pages.lock()) {
      use(pages.data());
      return Found::kUsed;
    }
  }
  if (!held) {
    let_go();
  }
  return resident ? Found::kCached : Found::kAbsent;
}

// No longer as soon as somebody waits for it, who is let in by the kernel after
// /proc/sys/fs/lease-break-time at the latest: 45 s, for what takes us 1 ms.
bool ResidentPages::is_held() const {
  return leased_ && ::fcntl(fd_, F_GETLEASE) == F_RDLCK;
}

void ResidentPages::let_go() {
  std::unique_lock<std::shared_mutex> lock(mutex_);
  if (leased_) {
    ::fcntl(fd_, F_SETLEASE, F_UNLCK);
    leased_ = false;
  }
}

}  // namespace plait
