// XXH3-128 of every piece of a file whose blocks come one after the other.
#ifndef PLAIT_CSRC_PIECE_HASHER_HPP_
#define PLAIT_CSRC_PIECE_HASHER_HPP_

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "checksum.hpp"
#include "stage_plan.hpp"

namespace plait {

// Used by one thread at a time. The pieces must outlive it.
class PieceHasher {
 public:
  explicit PieceHasher(const std::vector<StagedPiece>& pieces)
      : pieces_(pieces) {}

  // Takes the file's bytes [begin, end), which begin where the last ones ended.
  void update(const char* data, uint64_t begin, uint64_t end, bool last) {
    while (hashes_.size() < pieces_.size()) {
      const StagedPiece& piece = pieces_[hashes_.size()];
      const uint64_t piece_end = piece.file_offset + piece.bytes;
      const uint64_t from = std::max(begin, piece.file_offset);
      const uint64_t to = std::min(end, piece_end);
      if (from < to) {
        hasher_.update(data + (from - begin), to - from);
      }
      if (piece_end > end || (piece.file_offset >= end && !last)) {
        return;
      }
      hashes_.push_back(hasher_.take());
    }
  }

  // Of the pieces that are complete, in their order.
  const std::vector<std::string>& hashes() const { return hashes_; }

 private:
  const std::vector<StagedPiece>& pieces_;
  Xxh3 hasher_;
  std::vector<std::string> hashes_;
};

}  // namespace plait

#endif  // PLAIT_CSRC_PIECE_HASHER_HPP_
