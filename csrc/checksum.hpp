// CRC32C (Castagnoli, as in iSCSI and ext4) against damage, XXH3-128 for
// equality of content. Not cryptographic: neither stops an attacker.
#ifndef PLAIT_CSRC_CHECKSUM_HPP_
#define PLAIT_CSRC_CHECKSUM_HPP_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace plait {

constexpr int kWidest = 64;

// CRC32C of data; `value` is the result for the bytes before it, 0 at the
// start. Folds at most `width` bytes an instruction (64, 32, 16) where the
// processor can; 0: by tables, the portable path.
uint32_t crc32c(const void* data, size_t bytes, uint32_t value = 0,
                int width = kWidest);

// One CRC32C per block of `block_bytes`, the last one of what is left.
std::vector<uint32_t> crc32c_blocks(const void* data, size_t bytes,
                                    size_t block_bytes);

// XXH3-128 without seed: 16 bytes in canonical (big-endian) byte order.
std::string xxh3_128(const void* data, size_t bytes);

// The same for bytes that come in parts, in order. Used by one thread at a
// time.
class Xxh3 {
 public:
  Xxh3();
  ~Xxh3();
  Xxh3(const Xxh3&) = delete;
  Xxh3& operator=(const Xxh3&) = delete;

  void update(const void* data, size_t bytes);
  // The hash of what came since the last take() (or the construction).
  std::string take();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace plait

#endif  // PLAIT_CSRC_CHECKSUM_HPP_
