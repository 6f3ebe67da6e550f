#include "stage_hasher.hpp"

#include <algorithm>

#include "stream_copy.hpp"

namespace plait {
namespace {

constexpr uint64_t kReadAgain = uint64_t{64} << 10;  // Fits the second cache.
constexpr uint64_t kCopied = uint64_t{32} << 10;     // Fits the first one.

}  // namespace

StageHasher::StageHasher(const std::vector<StagedPiece>& pieces,
                         uint64_t file_bytes, uint64_t block_bytes)
    : pieces_(pieces),
      file_bytes_(file_bytes),
      block_bytes_(block_bytes),
      crcs_((file_bytes + block_bytes - 1) / block_bytes) {}

void StageHasher::update(const char* data, uint64_t bytes) {
  bytes = std::min(bytes, file_bytes_ - at_);  // Not what pads the last page.
  uint32_t& crc = crcs_[std::min(at_, file_bytes_ - 1) / block_bytes_];
  for (uint64_t done = 0; done < bytes; done += kReadAgain) {
    const uint64_t step = std::min(bytes - done, kReadAgain);
    crc = crc32c(data + done, step, crc);
    hash_pieces(data + done, at_ + step);
    at_ += step;
  }
}

void StageHasher::copy(char* to, const char* from, uint64_t bytes) {
  for (uint64_t done = 0; done < bytes; done += kCopied) {
    const uint64_t step = std::min(bytes - done, kCopied);
    stream_copy(to + done, from + done, step);
    update(from + done, step);
  }
}

// The bytes from at_ to `end`.
void StageHasher::hash_pieces(const char* data, uint64_t end) {
  while (hashes_.size() < pieces_.size()) {
    const StagedPiece& piece = pieces_[hashes_.size()];
    const uint64_t piece_end = piece.file_offset + piece.bytes;
    const uint64_t from = std::max(at_, piece.file_offset);
    const uint64_t to = std::min(end, piece_end);
    if (from < to) {
      hasher_.update(data + (from - at_), to - from);
    }
    if (piece_end > end ||
        (piece.file_offset >= end && end < file_bytes_)) {
      return;
    }
    hashes_.push_back(hasher_.take());
  }
}

}  // namespace plait
