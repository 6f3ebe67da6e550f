// Reads byte ranges of a data file into memory and verifies every block that
// it touches. Not for bytes without a checksum.
#ifndef PLAIT_CSRC_READER_HPP_
#define PLAIT_CSRC_READER_HPP_

#include <cstdint>
#include <string>
#include <vector>

#include "io.hpp"

namespace plait {

// A range of the file and the memory that takes it.
struct ReadRequest {
  uint64_t file_offset;
  uint64_t bytes;
  uint64_t address;
};

struct ReadOptions {
  uint64_t block_bytes = uint64_t{4} << 20;  // As at the writing.
  // Most of them wait for the disk; so many that it never waits for them.
  int threads = 8;
  bool direct = true;
};

// Checks that the file has `file_bytes` bytes, reads each block that a request
// touches once, compares it with its CRC32C and copies what was asked for.
// Returns the bytes read: the sizes of the touched blocks. Blocks that the page
// cache holds come from there, others by direct I/O where it works. Throws
// ChecksumError naming the block; memory is then partly filled.
uint64_t read_ranges(Io& io, const std::string& path, uint64_t file_bytes,
                     const std::vector<uint32_t>& crcs,
                     const std::vector<ReadRequest>& requests,
                     const ReadOptions& options);

}  // namespace plait

#endif  // PLAIT_CSRC_READER_HPP_
