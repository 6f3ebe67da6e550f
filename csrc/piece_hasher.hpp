// XXH3-128 of every piece of a file whose blocks come one after the other, and
// the CRC32C of each block.
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

  // Takes the file's bytes [begin, end), which begin where the last ones ended;
  // returns their CRC32C. Bit by bit, so that both find them in the cache.
  uint32_t update(const char* data, uint64_t begin, uint64_t end, bool last) {
    constexpr uint64_t kCached = uint64_t{64} << 10;
    uint32_t crc = 0;
    for (uint64_t at = begin; at < end; at += kCached) {
      const uint64_t to = std::min(at + kCached, end);
      crc = crc32c(data + (at - begin), to - at, crc);
      hash(data + (at - begin), at, to, last && to == end);
    }
    return crc;
  }

  // Of the pieces that are complete, in their order.
  const std::vector<std::string>& hashes() const { return hashes_; }

 private:
  void hash(const char* data, uint64_t begin, uint64_t end, bool last) {
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

  const std::vector<StagedPiece>& pieces_;
  Xxh3 hasher_;
  std::vector<std::string> hashes_;
};

}  // namespace plait

#endif  // PLAIT_CSRC_PIECE_HASHER_HPP_
