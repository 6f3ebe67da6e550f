#include "stage_progress.hpp"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "file.hpp"

namespace plait {
namespace {

bool is_eager(const StagePart& part) { return part.piece >= 0 && !part.lazy; }

}  // namespace

StageProgress::StageProgress(const StagePlan& plan, uint64_t file_bytes)
    : plan_(plan),
      file_bytes_(file_bytes),
      states_(plan.parts.size(), State::kPending),
      left_(plan.num_blocks, plan.block_bytes),
      bytes_left_(round_up(file_bytes, kDirectAlignment)),
      in_file_(plan.parts.size()) {
  left_.back() -= plan.num_blocks * plan.block_bytes - bytes_left_;
  for (const StagePart& part : plan.parts) {
    eager_left_ += is_eager(part) ? part.bytes : 0;
  }
  std::iota(in_file_.begin(), in_file_.end(), size_t{0});
  std::sort(in_file_.begin(), in_file_.end(), [&plan](size_t a, size_t b) {
    return plan.parts[a].file_offset < plan.parts[b].file_offset;
  });
}

size_t StageProgress::next_pending() {
  while (next_part_ < states_.size() &&
         states_[next_part_] != State::kPending) {
    ++next_part_;
  }
  return next_part_;
}

void StageProgress::begin(size_t part) {
  states_[part] = State::kRunning;
  ++running_;
}

bool StageProgress::end(size_t part) {
  const StagePart& ended = plan_.parts[part];
  states_[part] = State::kDone;
  --running_;
  eager_left_ -= is_eager(ended) ? ended.bytes : 0;
  return count_in(ended.file_offset, ended.bytes);
}

bool StageProgress::count_in(uint64_t file_offset, uint64_t bytes) {
  bool completed = false;
  while (bytes > 0) {
    const uint64_t block = file_offset / plan_.block_bytes;
    const uint64_t step =
        std::min(bytes, (block + 1) * plan_.block_bytes - file_offset);
    if (block >= left_.size() || step > left_[block]) {
      throw std::invalid_argument("Stage: a block has more than its bytes");
    }
    left_[block] -= step;
    bytes_left_ -= step;
    completed = completed || left_[block] == 0;
    file_offset += step;
    bytes -= step;
  }
  return completed;
}

uint64_t StageProgress::hashable() {
  if (hashing_ || all_hashed()) {
    return 0;
  }
  const uint64_t block = hashed_bytes_ / plan_.block_bytes;
  if (left_[block] == 0) {
    const uint64_t end = (block + 1) * plan_.block_bytes;
    return std::min(end, file_bytes_) - hashed_bytes_;
  }
  while (next_in_file_ < in_file_.size() &&
         plan_.parts[in_file_[next_in_file_]].file_offset < hashed_bytes_) {
    ++next_in_file_;
  }
  if (next_in_file_ == in_file_.size()) {
    return 0;
  }
  const size_t next = in_file_[next_in_file_];
  const StagePart& part = plan_.parts[next];
  const bool is_in =
      part.file_offset == hashed_bytes_ && states_[next] == State::kDone;
  return is_in ? part.bytes : 0;
}

bool StageProgress::end_hash(uint64_t bytes) {
  hashing_ = false;
  hashed_bytes_ += bytes;
  return all_hashed() || hashed_bytes_ % plan_.block_bytes == 0;
}

}  // namespace plait
