// Memory that direct I/O accepts. Not a pool: one block, taken on first use.
#ifndef PLAIT_CSRC_ALIGNED_BUFFER_HPP_
#define PLAIT_CSRC_ALIGNED_BUFFER_HPP_

#include <cstdlib>
#include <memory>
#include <new>

#include "file.hpp"

namespace plait {

// Owns `bytes` (a multiple of kDirectAlignment) from the first data() on; used
// by one thread at a time. Throws std::bad_alloc.
class AlignedBuffer {
 public:
  explicit AlignedBuffer(size_t bytes) : bytes_(bytes) {}

  char* data() {
    if (!memory_) {
      memory_.reset(
          static_cast<char*>(std::aligned_alloc(kDirectAlignment, bytes_)));
      if (!memory_) {
        throw std::bad_alloc();
      }
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };

  size_t bytes_;
  std::unique_ptr<char, Free> memory_;
};

// True when direct I/O may use this address and length.
inline bool is_aligned(uint64_t address, uint64_t bytes) {
  return address % kDirectAlignment == 0 && bytes % kDirectAlignment == 0;
}

}  // namespace plait

#endif  // PLAIT_CSRC_ALIGNED_BUFFER_HPP_
