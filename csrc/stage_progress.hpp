// What of a stage's file is in the pool, and what of that is hashed: counts.
// Not a lock and not a copier: the stage's mutex guards it.
#ifndef PLAIT_CSRC_STAGE_PROGRESS_HPP_
#define PLAIT_CSRC_STAGE_PROGRESS_HPP_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "stage_plan.hpp"

namespace plait {

// Parts are named by their index in the plan, which must outlive it.
class StageProgress {
 public:
  enum class State : uint8_t { kPending, kRunning, kDone };

  StageProgress(const StagePlan& plan, uint64_t file_bytes);

  State state(size_t part) const { return states_[part]; }
  // The first in the order of copying that nobody has begun; none: the number
  // of parts.
  size_t next_pending();
  void begin(size_t part);
  bool end(size_t part);
  // Counts bytes that are in, and returns, as end() does, whether these were
  // the last of a block. Throws std::invalid_argument for more than there are
  // of a block, and for bytes behind the file.
  bool count_in(uint64_t file_offset, uint64_t bytes);

  int running() const { return running_; }
  // Of the parts that a capture call waits for, and of all.
  bool eager_in() const { return eager_left_ == 0; }
  bool all_in() const { return bytes_left_ == 0; }
  uint64_t eager_left() const { return eager_left_; }
  uint64_t bytes_left() const { return bytes_left_; }

  // The file is hashed from its start to its end by one thread at a time.
  uint64_t hashed_bytes() const { return hashed_bytes_; }
  bool all_hashed() const { return hashed_bytes_ >= file_bytes_; }
  // All of a block is in and hashed.
  bool is_ready(uint64_t block) const {
    const uint64_t end = (block + 1) * plan_.block_bytes;
    return left_[block] == 0 && hashed_bytes_ >= std::min(end, file_bytes_);
  }
  // How many bytes from there on are in, of one block; 0 while one hashes.
  uint64_t hashable();
  // True when this part comes next and nobody hashes.
  bool is_next_to_hash(size_t part) const {
    return !hashing_ && plan_.parts[part].file_offset == hashed_bytes_;
  }
  void begin_hash() { hashing_ = true; }
  // Returns whether that completed a block.
  bool end_hash(uint64_t bytes);

 private:
  const StagePlan& plan_;
  const uint64_t file_bytes_;
  std::vector<State> states_;
  std::vector<uint64_t> left_;  // Bytes of each block that are not in yet.
  size_t next_part_ = 0;
  uint64_t eager_left_ = 0;
  uint64_t bytes_left_ = 0;
  int running_ = 0;
  bool hashing_ = false;
  uint64_t hashed_bytes_ = 0;
  std::vector<size_t> in_file_;  // Parts in the order of the file.
  size_t next_in_file_ = 0;      // The first that may not be hashed yet.
};

}  // namespace plait

#endif  // PLAIT_CSRC_STAGE_PROGRESS_HPP_
