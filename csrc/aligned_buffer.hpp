// Memory that direct I/O accepts. Not a pool: one block, taken on first use.
//
// The one idea: whole huge pages. A device moves a block of them by a few long
// descriptors; scattered 4 KiB pages take it about twice as long. A forked
// child (a data loader's worker) does not get them: direct I/O and a device
// would go on with pages that the parent no longer has once it writes to them
// (open(2), Notes), and each such write would first copy a huge page.
#ifndef PLAIT_CSRC_ALIGNED_BUFFER_HPP_
#define PLAIT_CSRC_ALIGNED_BUFFER_HPP_

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

#include "errors.hpp"
#include "file.hpp"

namespace plait {

constexpr size_t kHugePageBytes = size_t{2} << 20;

// Owns `bytes` (a multiple of kDirectAlignment) of anonymous memory from the
// first data() on, at a huge-page boundary; used by one thread at a time.
// Throws std::system_error when there is no memory.
class AlignedBuffer {
 public:
  explicit AlignedBuffer(size_t bytes) : bytes_(bytes) {}
  ~AlignedBuffer() {
    if (data_ != nullptr && owner_ == ::getpid()) {  // A child never had it.
      ::munmap(data_, bytes_);
    }
  }
  AlignedBuffer(AlignedBuffer&& other) noexcept
      : bytes_(other.bytes_),
        data_(std::exchange(other.data_, nullptr)),
        owner_(other.owner_) {}
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;

  size_t bytes() const { return bytes_; }

  char* data() {
    if (data_ == nullptr) {
      data_ = map();
      owner_ = ::getpid();
      // Wishes: without transparent huge pages small ones do.
      ::madvise(data_, bytes_, MADV_HUGEPAGE);
      ::madvise(data_, bytes_, MADV_DONTFORK);
    }
    return data_;
  }

 private:
  // Maps one huge page more and gives the unaligned ends back.
  char* map() const {
    void* memory = ::mmap(nullptr, bytes_ + kHugePageBytes,
                          PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                          -1, 0);
    if (memory == MAP_FAILED) {
      throw_errno(errno, "mmap", std::to_string(bytes_) + " bytes of memory");
    }
    char* const begin = static_cast<char*>(memory);
    const auto address = reinterpret_cast<uintptr_t>(begin);
    const size_t before = round_up(address, kHugePageBytes) - address;
    if (before > 0) {
      ::munmap(begin, before);
    }
    ::munmap(begin + before + bytes_, kHugePageBytes - before);
    return begin + before;
  }

  size_t bytes_;
  char* data_ = nullptr;
  pid_t owner_ = 0;  // Who mapped it.
};

// True when direct I/O may use this address and length.
inline bool is_aligned(uint64_t address, uint64_t bytes) {
  return address % kDirectAlignment == 0 && bytes % kDirectAlignment == 0;
}

}  // namespace plait

#endif  // PLAIT_CSRC_ALIGNED_BUFFER_HPP_
