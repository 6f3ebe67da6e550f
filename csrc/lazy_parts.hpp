// The parts of a stage that may be copied after the capture call: what they
// held at the call, as samples, and where they lie.
#ifndef PLAIT_CSRC_LAZY_PARTS_HPP_
#define PLAIT_CSRC_LAZY_PARTS_HPP_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "stage_plan.hpp"

namespace plait {

// Reads the parts' memory in the constructor and in is_changed() only. Const
// after construction, so any thread may ask.
class LazyParts {
 public:
  // Address and bytes.
  using Range = std::pair<uint64_t, uint64_t>;

  explicit LazyParts(const std::vector<StagePart>& parts);

  // True when the sample of part `index` is another one in the copy, or in the
  // memory itself: a write that came while the copy ran may have missed the
  // sample in the one but not in the other.
  bool is_changed(size_t index, const char* copy) const;
  // Indices of the parts that overlap any of the ranges, rising.
  std::vector<size_t> overlapping(const std::vector<Range>& ranges) const;

 private:
  struct Sample {
    uint64_t at = 0;
    uint64_t bytes = 0;
    char data[64];
  };

  const std::vector<StagePart>& parts_;
  std::vector<Sample> samples_;    // Of each part; empty for others.
  std::vector<size_t> by_source_;  // Lazy parts by address.
};

}  // namespace plait

#endif  // PLAIT_CSRC_LAZY_PARTS_HPP_
