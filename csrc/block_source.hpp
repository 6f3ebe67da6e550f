// Where a writer finds the bytes of a file, one block after the other.
#ifndef PLAIT_CSRC_BLOCK_SOURCE_HPP_
#define PLAIT_CSRC_BLOCK_SOURCE_HPP_

#include <cstddef>
#include <cstdint>
#include <exception>

namespace plait {

// Thread rule: begin() comes first, block() and written() come from several workers at once; every
// block is asked for once, in rising order over all workers.
class BlockSource {
 public:
  virtual ~BlockSource() = default;

  // Before the first block. copied: writing one takes a processor, to copy it.
  virtual void begin(bool copied) = 0;
  // The block's bytes, ready to be written by direct I/O: at an aligned
  // address, zeros up to a multiple of kDirectAlignment. May wait for them, and
  // throw when they will not come. Valid until written(block) or, for memory
  // of the worker's own, until its next block. crc: takes their CRC32C.
  virtual const char* block(int worker, uint64_t block, size_t bytes,
                            uint32_t* crc) = 0;
  // The block has been written: its memory may be used again.
  virtual void written(uint64_t block) = 0;
  // The writer gives up for this reason: whoever waits in block() is thrown it.
  virtual void give_up(std::exception_ptr reason) = 0;
};

}  // namespace plait

#endif  // PLAIT_CSRC_BLOCK_SOURCE_HPP_
