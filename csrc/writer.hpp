// Writes one data file: direct I/O, several threads, one CRC32C per block.
// Not atomic: a file is good once a manifest says so.
#ifndef PLAIT_CSRC_WRITER_HPP_
#define PLAIT_CSRC_WRITER_HPP_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "block_source.hpp"
#include "io.hpp"
#include "workers.hpp"

namespace plait {

// Bytes in memory and their place in the file.
struct Piece {
  uint64_t address;
  uint64_t bytes;
  uint64_t file_offset;
};

struct WriteOptions {
  uint64_t block_bytes = uint64_t{4} << 20;  // A multiple of 4096.
  int threads = 2;
  uint64_t rate_limit = 0;  // Bytes per second over all threads; 0 = none.
  bool direct = true;
  Priority priority = {};  // Of the threads.
  // There is an old file under the name. It is written over where nothing else
  // refers to it, which saves the allocation of its blocks; else it is removed.
  bool over = false;
};

struct WriteResult {
  std::vector<uint32_t> crcs;   // Of each block of the file, from byte 0.
  bool direct = false;          // False as soon as one write was buffered.
  std::string fallback_reason;  // Why not direct although asked for.
  bool reused = false;          // The old file was written over.
};

// Creates `path` (mode 0600; it must not exist, unless options.over), fills its
// `file_bytes` bytes from `source`, syncs and closes it. On failure the
// unfinished file is removed and the first error thrown: a sync that failed
// once is never tried again.
WriteResult write_blocks(Io& io, const std::string& path, BlockSource& source,
                         uint64_t file_bytes, const WriteOptions& options);

// The same for bytes in memory: `header` at 0, the pieces at their offsets and
// zeros elsewhere. Pieces may come in any order; they must not overlap. The
// memory must not change meanwhile.
WriteResult write_file(Io& io, const std::string& path, std::string_view header,
                       std::vector<Piece> pieces, uint64_t file_bytes,
                       const WriteOptions& options);

}  // namespace plait

#endif  // PLAIT_CSRC_WRITER_HPP_
