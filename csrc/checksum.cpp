#include "checksum.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>

#define XXH_INLINE_ALL
#include "vendor/xxhash.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace plait {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78;  // Castagnoli, bits reflected.

using Tables = std::array<std::array<uint32_t, 256>, 8>;

// tables[k][b]: what byte b contributes when k more bytes follow it.
constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    }
    tables[0][byte] = crc;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t crc = tables[k - 1][byte];
      tables[k][byte] = tables[0][crc & 0xFF] ^ (crc >> 8);
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

uint64_t load64(const uint8_t* data) {
  uint64_t word;
  std::memcpy(&word, data, sizeof(word));
  return word;
}

uint32_t update_table(uint32_t crc, const uint8_t* data, size_t bytes) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  for (; bytes >= 8; data += 8, bytes -= 8) {
    const uint64_t word = load64(data) ^ crc;
    crc = 0;
    for (size_t k = 0; k < 8; ++k) {
      crc ^= kTables[7 - k][(word >> (8 * k)) & 0xFF];
    }
  }
#endif
  for (; bytes > 0; ++data, --bytes) {
    crc = kTables[0][(crc ^ *data) & 0xFF] ^ (crc >> 8);
  }
  return crc;
}

#if defined(__x86_64__)

// The instruction takes 3 cycles and can start in each, so three lanes of the
// data run side by side and are joined afterwards. 1 KiB: long enough to hide
// the join, short enough that most blocks are covered.
constexpr size_t kLaneBytes = 1024;

using Matrix = std::array<uint32_t, 32>;  // Column i = image of bit i.

constexpr uint32_t apply_matrix(const Matrix& matrix, uint32_t vector) {
  uint32_t image = 0;
  for (size_t bit = 0; bit < 32; ++bit) {
    image ^= ((vector >> bit) & 1) != 0 ? matrix[bit] : 0;
  }
  return image;
}

using LaneShift = std::array<std::array<uint32_t, 256>, 4>;

// The effect of kLaneBytes zero bytes on a CRC, as one table per CRC byte: the
// matrix of one zero byte, squared log2(kLaneBytes) times.
constexpr LaneShift make_lane_shift() {
  Matrix matrix{};
  for (size_t bit = 0; bit < 32; ++bit) {
    const uint32_t crc = uint32_t{1} << bit;
    matrix[bit] = kTables[0][crc & 0xFF] ^ (crc >> 8);
  }
  for (size_t length = 1; length < kLaneBytes; length *= 2) {
    Matrix square{};
    for (size_t bit = 0; bit < 32; ++bit) {
      square[bit] = apply_matrix(matrix, matrix[bit]);
    }
    matrix = square;
  }
  LaneShift shift{};
  for (size_t k = 0; k < 4; ++k) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      shift[k][byte] = apply_matrix(matrix, byte << (8 * k));
    }
  }
  return shift;
}

constexpr LaneShift kLaneShift = make_lane_shift();

uint32_t shift_lane(uint32_t crc) {
  return kLaneShift[0][crc & 0xFF] ^ kLaneShift[1][(crc >> 8) & 0xFF] ^
         kLaneShift[2][(crc >> 16) & 0xFF] ^ kLaneShift[3][crc >> 24];
}

__attribute__((target("sse4.2"))) uint32_t update_sse42(uint32_t crc,
                                                        const uint8_t* data,
                                                        size_t bytes) {
  for (; bytes >= 3 * kLaneBytes;
       data += 3 * kLaneBytes, bytes -= 3 * kLaneBytes) {
    uint64_t lane0 = crc;
    uint64_t lane1 = 0;
    uint64_t lane2 = 0;
    for (size_t i = 0; i < kLaneBytes; i += 8) {
      lane0 = _mm_crc32_u64(lane0, load64(data + i));
      lane1 = _mm_crc32_u64(lane1, load64(data + kLaneBytes + i));
      lane2 = _mm_crc32_u64(lane2, load64(data + 2 * kLaneBytes + i));
    }
    crc =
        shift_lane(static_cast<uint32_t>(lane0)) ^ static_cast<uint32_t>(lane1);
    crc = shift_lane(crc) ^ static_cast<uint32_t>(lane2);
  }
  for (; bytes >= 8; data += 8, bytes -= 8) {
    crc = static_cast<uint32_t>(_mm_crc32_u64(crc, load64(data)));
  }
  for (; bytes > 0; ++data, --bytes) {
    crc = _mm_crc32_u8(crc, *data);
  }
  return crc;
}

#endif  // defined(__x86_64__)

}  // namespace

bool crc32c_has_hardware() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("sse4.2") != 0;
#else
  return false;
#endif
}

uint32_t crc32c_table(const void* data, size_t bytes, uint32_t value) {
  return ~update_table(~value, static_cast<const uint8_t*>(data), bytes);
}

uint32_t crc32c(const void* data, size_t bytes, uint32_t value) {
#if defined(__x86_64__)
  if (crc32c_has_hardware()) {
    return ~update_sse42(~value, static_cast<const uint8_t*>(data), bytes);
  }
#endif
  return crc32c_table(data, bytes, value);
}

std::vector<uint32_t> crc32c_blocks(const void* data, size_t bytes,
                                    size_t block_bytes) {
  if (block_bytes == 0) {
    throw std::invalid_argument("crc32c_blocks: block_bytes is 0");
  }
  std::vector<uint32_t> crcs;
  const char* source = static_cast<const char*>(data);
  for (size_t begin = 0; begin < bytes; begin += block_bytes) {
    crcs.push_back(
        crc32c(source + begin, std::min(block_bytes, bytes - begin)));
  }
  return crcs;
}

std::string xxh3_128(const void* data, size_t bytes) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(data, bytes));
  return {reinterpret_cast<const char*>(canonical.digest),
          sizeof(canonical.digest)};
}

struct Xxh3::State {
  XXH3_state_t hash;  // Wants 64-byte alignment, which new gives it (C++17).
};

Xxh3::Xxh3() : state_(std::make_unique<State>()) {
  XXH3_128bits_reset(&state_->hash);
}

Xxh3::~Xxh3() = default;

void Xxh3::update(const void* data, size_t bytes) {
  XXH3_128bits_update(&state_->hash, data, bytes);
}

std::string Xxh3::take() {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(&state_->hash));
  XXH3_128bits_reset(&state_->hash);
  return {reinterpret_cast<const char*>(canonical.digest),
          sizeof(canonical.digest)};
}

}  // namespace plait
