// Which bytes of which block go where: pure arithmetic.
#ifndef PLAIT_CSRC_READ_PLAN_HPP_
#define PLAIT_CSRC_READ_PLAN_HPP_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "reader.hpp"

namespace plait {

// What one request wants of one block.
struct ReadPart {
  uint64_t block;
  uint64_t offset;  // In the block.
  uint64_t bytes;
  char* target;
};

// Cuts the requests at block boundaries; sorted by block. Throws
// std::invalid_argument for options or a number of checksums that cannot be,
// and for a request that leaves the file or has no memory.
std::vector<ReadPart> plan_reads(const std::vector<ReadRequest>& requests,
                                 uint64_t file_bytes, size_t num_crcs,
                                 const ReadOptions& options);

}  // namespace plait

#endif  // PLAIT_CSRC_READ_PLAN_HPP_
