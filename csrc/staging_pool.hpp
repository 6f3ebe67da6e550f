// Host memory that a snapshot is copied into before it is written. Not an
// allocator: the caller lays out what lies where.
//
// One idea: taken, faulted in and (optionally) pinned once, so that no save
// pays for page faults. A fresh allocation per save costs about 6 times a copy
// into a warm pool.
#ifndef PLAIT_CSRC_STAGING_POOL_HPP_
#define PLAIT_CSRC_STAGING_POOL_HPP_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "aligned_buffer.hpp"
#include "cuda_driver.hpp"

namespace plait {

// Owns anonymous memory, aligned to and a multiple of a huge page, and, once
// pinned, its registration with the driver.
class HugeMapping {
 public:
  HugeMapping(size_t bytes, int threads);
  ~HugeMapping();
  HugeMapping(const HugeMapping&) = delete;
  HugeMapping& operator=(const HugeMapping&) = delete;

  char* data() const { return data_; }
  size_t bytes() const { return memory_.bytes(); }
  bool pinned() const { return driver_ != nullptr; }
  // Once. Throws std::runtime_error when there is no driver, or it refuses.
  void pin();

 private:
  AlignedBuffer memory_;
  char* const data_;
  std::unique_ptr<CudaDriver> driver_;  // Of a pinned one.
  void* context_ = nullptr;             // In which it was pinned.
};

// One transfer between the pool and memory elsewhere.
struct Copy {
  uint64_t address;
  uint64_t bytes;
  uint64_t pool_offset;
};

// Shares its mapping with the views taken of it, which keep it alive after
// close(). Copies run in threads that end with the call; errors of arguments
// throw std::invalid_argument before any byte moves. Copies and views may be
// asked for from any thread; regions that overlap are the caller's affair.
class StagingPool {
 public:
  // Throws std::system_error when there is no memory, std::runtime_error when
  // `pin` is asked for and the driver is absent or refuses.
  StagingPool(uint64_t capacity_bytes, int threads, bool pin);

  // At least what was asked for: rounded up to whole huge pages.
  uint64_t capacity() const { return mapping()->bytes(); }
  uint64_t address() const;
  bool pinned() const;
  // Page-locks the memory for CUDA, also while parts of it are in use; nothing
  // if it is. Throws std::runtime_error when the driver is absent or refuses.
  void pin();
  void copy_in(const std::vector<Copy>& copies) const;
  void copy_out(const std::vector<Copy>& copies) const;
  // The mapping, after checking that the range lies in it.
  std::shared_ptr<HugeMapping> view(uint64_t offset, uint64_t bytes) const;
  void close();

 private:
  std::shared_ptr<HugeMapping> mapping() const;
  void copy(const std::vector<Copy>& copies, bool into_pool) const;

  const int threads_;
  mutable std::mutex mutex_;  // Guards mapping_, which close() drops, and pin.
  std::shared_ptr<HugeMapping> mapping_;
};

}  // namespace plait

#endif  // PLAIT_CSRC_STAGING_POOL_HPP_
