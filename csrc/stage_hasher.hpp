// CRC32C of every block of a stage's file and XXH3-128 of every piece, made in
// the order of the file as its bytes come in. Knows no threads.
#ifndef PLAIT_CSRC_STAGE_HASHER_HPP_
#define PLAIT_CSRC_STAGE_HASHER_HPP_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "checksum.hpp"
#include "stage_plan.hpp"

namespace plait {

// Used by one thread at a time. The pieces must outlive it.
class StageHasher {
 public:
  StageHasher(const std::vector<StagedPiece>& pieces, uint64_t file_bytes,
              uint64_t block_bytes);

  // The file's next bytes, none of them in the block after: hashes them, bit by
  // bit, so that both sums find them in the cache.
  void update(const char* data, uint64_t bytes);
  // The same, and copies each bit while the cache has it.
  void copy(char* to, const char* from, uint64_t bytes);

  // Of blocks that are complete.
  uint32_t crc(uint64_t block) const { return crcs_[block]; }
  // Of the pieces that are complete, in their order.
  const std::vector<std::string>& hashes() const { return hashes_; }

 private:
  void hash_pieces(const char* data, uint64_t end);

  const std::vector<StagedPiece>& pieces_;
  const uint64_t file_bytes_;
  const uint64_t block_bytes_;
  uint64_t at_ = 0;
  std::vector<uint32_t> crcs_;  // Of each block as far as at_.
  Xxh3 hasher_;
  std::vector<std::string> hashes_;
};

}  // namespace plait

#endif  // PLAIT_CSRC_STAGE_HASHER_HPP_
