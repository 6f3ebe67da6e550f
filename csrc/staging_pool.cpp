#include "staging_pool.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "file.hpp"
#include "workers.hpp"

namespace plait {
namespace {

// A task's share: small enough to balance the threads, and below this in total
// starting a thread costs more than the copy.
constexpr uint64_t kTaskBytes = uint64_t{4} << 20;

}  // namespace

HugeMapping::HugeMapping(size_t bytes, int threads)
    : memory_(bytes), data_(memory_.data()) {
  constexpr size_t kPage = 4096;
  Workers workers(threads, "plait-fault", bytes / kHugePageBytes,
                  [this](int, uint64_t task) {
                    char* const begin = data_ + task * kHugePageBytes;
                    for (size_t i = 0; i < kHugePageBytes; i += kPage) {
                      static_cast<volatile char*>(begin)[i] = 0;
                    }
                  });
  workers.close();
}

void HugeMapping::pin() {
  auto driver = std::make_unique<CudaDriver>();
  if (!driver->available()) {
    throw std::runtime_error("StagingPool: pin=True needs the CUDA driver: " +
                             driver->reason());
  }
  context_ = driver->host_register(data_, bytes());
  driver_ = std::move(driver);
}

HugeMapping::~HugeMapping() {
  if (driver_) {
    try {
      driver_->host_unregister(data_, context_);
    } catch (const std::runtime_error&) {
      // The driver was shut down first and has unpinned everything itself.
    }
  }
}

StagingPool::StagingPool(uint64_t capacity_bytes, int threads, bool pin)
    : threads_(threads) {
  if (threads < 1) {
    throw std::invalid_argument("StagingPool: threads is " +
                                std::to_string(threads) + ", must be >= 1");
  }
  if (capacity_bytes > (uint64_t{1} << 46)) {
    throw std::invalid_argument("StagingPool: capacity_bytes is " +
                                std::to_string(capacity_bytes) +
                                ", must be at most 2**46");
  }
  const uint64_t bytes =
      round_up(std::max<uint64_t>(capacity_bytes, 1), kHugePageBytes);
  mapping_ = std::make_shared<HugeMapping>(bytes, threads);
  if (pin) {
    this->pin();
  }
}

bool StagingPool::pinned() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return mapping_ && mapping_->pinned();
}

void StagingPool::pin() {
  const auto shared = mapping();
  std::lock_guard<std::mutex> lock(mutex_);
  if (!shared->pinned()) {
    shared->pin();
  }
}

std::shared_ptr<HugeMapping> StagingPool::mapping() const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!mapping_) {
    throw std::invalid_argument("StagingPool is closed");
  }
  return mapping_;
}

uint64_t StagingPool::address() const {
  return reinterpret_cast<uintptr_t>(mapping()->data());
}

void StagingPool::close() {
  std::shared_ptr<HugeMapping> dropped;  // Unmapped outside the lock.
  std::lock_guard<std::mutex> lock(mutex_);
  dropped = std::exchange(mapping_, nullptr);
}

std::shared_ptr<HugeMapping> StagingPool::view(uint64_t offset,
                                               uint64_t bytes) const {
  auto shared = mapping();
  if (offset > shared->bytes() || bytes > shared->bytes() - offset) {
    throw std::invalid_argument("StagingPool: [" + std::to_string(offset) +
                                ", +" + std::to_string(bytes) +
                                ") is outside its " +
                                std::to_string(shared->bytes()) + " bytes");
  }
  return shared;
}

void StagingPool::copy(const std::vector<Copy>& copies, bool into_pool) const {
  const auto shared = mapping();
  std::vector<Copy> tasks;
  uint64_t total = 0;
  for (const Copy& item : copies) {
    view(item.pool_offset, item.bytes);
    if (item.address == 0 && item.bytes > 0) {
      throw std::invalid_argument("StagingPool: address 0 with " +
                                  std::to_string(item.bytes) + " bytes");
    }
    for (uint64_t at = 0; at < item.bytes; at += kTaskBytes) {
      tasks.push_back({item.address + at, std::min(kTaskBytes, item.bytes - at),
                       item.pool_offset + at});
    }
    total += item.bytes;
  }
  const auto run = [&](int, uint64_t task) {
    const Copy& part = tasks[task];
    void* outside = reinterpret_cast<void*>(part.address);
    void* inside = shared->data() + part.pool_offset;
    std::memcpy(into_pool ? inside : outside, into_pool ? outside : inside,
                part.bytes);
  };
  if (total <= kTaskBytes || threads_ == 1) {
    for (uint64_t task = 0; task < tasks.size(); ++task) {
      run(0, task);
    }
    return;
  }
  Workers workers(threads_, "plait-copy", tasks.size(), run);
  workers.close();
}

void StagingPool::copy_in(const std::vector<Copy>& copies) const {
  copy(copies, true);
}

void StagingPool::copy_out(const std::vector<Copy>& copies) const {
  copy(copies, false);
}

}  // namespace plait
