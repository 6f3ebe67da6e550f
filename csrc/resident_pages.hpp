// Reads what the page cache has of a file where it is, which spares the kernel's
// copy of it. Not a way to read from a disk.
//
// The one idea: memory of a mapping is only touched while it cannot go away. A
// file that becomes shorter, or a disk that fails, would end the process by
// SIGBUS; so a lease makes whoever would change the file wait for us, and
// pages are locked into memory first. Two get past the lease: who has waited
// for lease-break-time (45 s) as we were stopped in a block, and who cuts the
// file without opening it for writing (O_RDONLY | O_TRUNC; truncate() of an
// overlay, of whose upper layer we read).
#ifndef PLAIT_CSRC_RESIDENT_PAGES_HPP_
#define PLAIT_CSRC_RESIDENT_PAGES_HPP_

#include <cstdint>
#include <functional>
#include <shared_mutex>

#include "file.hpp"
#include "io.hpp"

namespace plait {

// Owns a lease on an open file that must outlive it, where one is to be had.
// Thread-safe by `mutex_`.
class ResidentPages {
 public:
  enum class Found { kAbsent, kCached, kUsed };

  ResidentPages(Io& io, const File& file);
  ~ResidentPages() { let_go(); }
  ResidentPages(const ResidentPages&) = delete;
  ResidentPages& operator=(const ResidentPages&) = delete;

  // The page cache has the whole range. Offset: a multiple of the page.
  bool are_resident(uint64_t offset, uint64_t bytes) const;
  // Calls `use` with the bytes of a range (kUsed) that the page cache has;
  // kCached where it has them and they have to be read, kAbsent where it lacks
  // some. What `use` throws goes through.
  Found use(uint64_t offset, uint64_t bytes,
            const std::function<void(const char*)>& use);
  // Gives the lease back; to be called before the file is closed.
  void let_go();

 private:
  bool is_held() const;

  const int fd_;
  const bool is_told_;  // What the page cache has of the file.
  std::shared_mutex mutex_;  // Guards leased_; shared while memory is touched.
  bool leased_;
};

}  // namespace plait

#endif  // PLAIT_CSRC_RESIDENT_PAGES_HPP_
