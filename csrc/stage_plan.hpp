// Which bytes are copied where for one data file: pure arithmetic.
//
// The one idea: the pool holds the file's blocks as the file will have them. A
// pool as large as the file has a place for each block; a smaller one has
// slots, which blocks take in turn as those before them are written.
#ifndef PLAIT_CSRC_STAGE_PLAN_HPP_
#define PLAIT_CSRC_STAGE_PLAN_HPP_

#include <cstdint>
#include <string>
#include <vector>

namespace plait {

// Bytes of the file and the memory that has them; address 0: the caller fills
// them in itself. Lazy ones may be copied after the capture call returned.
struct StagedPiece {
  uint64_t address;
  uint64_t bytes;
  uint64_t file_offset;
  bool lazy;
};

// One copy: inside one block and at most kPartBytes. Null source: zeros.
struct StagePart {
  const char* source;
  uint64_t bytes;
  uint64_t file_offset;
  int64_t piece;  // -1: header or padding.
  bool lazy;
  bool in_turn;  // Its block waits for a slot: copied in file order.
};

// 64 samples of a 64 MiB bucket are one a part; and a fence waits for at most
// this much of a copy that runs at low priority.
constexpr uint64_t kPartBytes = uint64_t{1} << 20;

struct StagePlan {
  uint64_t block_bytes = 0;
  uint64_t num_blocks = 0;
  std::vector<StagePart> parts;        // In the order of copying.
  std::vector<uint64_t> pool_offsets;  // Of each block.
  // The block that must be written before this one may be copied, or -1.
  std::vector<int64_t> predecessors;
  uint64_t slabs = 1;       // How often the busiest slot is filled.
  uint64_t held_bytes = 0;  // What gets a slot only when others are written.
};

// Throws std::invalid_argument for pieces that overlap, leave the file or do
// not rise, and for a pool of less than two blocks that does not hold the file.
StagePlan plan_stage(const std::string& header,
                     const std::vector<StagedPiece>& pieces,
                     uint64_t file_bytes, uint64_t block_bytes,
                     uint64_t pool_bytes);

}  // namespace plait

#endif  // PLAIT_CSRC_STAGE_PLAN_HPP_
