// CRC32C by carry-less multiplication. Not for machines without it.
//
// The one idea: 16 bytes may be replaced by their product with a power of x,
// added to those further on; so data is folded until little is left of it.
#ifndef PLAIT_CSRC_CRC32C_FOLD_HPP_
#define PLAIT_CSRC_CRC32C_FOLD_HPP_

#include <cstddef>
#include <cstdint>

namespace plait {

// Castagnoli, bits reflected.
constexpr uint32_t kCrc32cPolynomial = 0x82F63B78;

// The most bytes that this processor folds by one instruction: 64, 32, 16, or
// 0 when it has none for that.
int crc32c_fold_width();

// The checksum's register after these bytes, `crc` before (neither inverted).
// width: 16, 32 or 64, not above crc32c_fold_width().
uint32_t crc32c_fold(uint32_t crc, const uint8_t* data, size_t bytes,
                     int width);

}  // namespace plait

#endif  // PLAIT_CSRC_CRC32C_FOLD_HPP_
