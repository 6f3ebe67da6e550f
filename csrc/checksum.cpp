#include "checksum.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>

#include "crc32c_fold.hpp"

#define XXH_INLINE_ALL
#if defined(__x86_64__)
#define XXH_DISPATCH_AVX2 1
#define XXH_TARGET_AVX2 __attribute__((target("avx2")))
#include <immintrin.h>
#endif
#include "vendor/xxhash.h"

namespace plait {
namespace {

using Tables = std::array<std::array<uint32_t, 256>, 8>;

// tables[k][b]: what byte b contributes when k more bytes follow it.
constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1) != 0 ? kCrc32cPolynomial : 0);
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
__attribute__((target("avx2"))) void update_avx2(XXH3_state_t* state,
                                                 const void* data,
                                                 size_t bytes) {
  XXH3_update(state, static_cast<const xxh_u8*>(data), bytes,
              XXH3_accumulate_avx2, XXH3_scrambleAcc_avx2);
}
#endif

// The header takes its vectors from the compiler's flags, which are those that
// every machine has. The state is the same with wider ones.
void update_xxh3(XXH3_state_t* state, const void* data, size_t bytes) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") != 0) {
    update_avx2(state, data, bytes);
    return;
  }
#endif
  XXH3_128bits_update(state, data, bytes);
}

}  // namespace

uint32_t crc32c(const void* data, size_t bytes, uint32_t value, int width) {
  const auto* const source = static_cast<const uint8_t*>(data);
  width = std::min(width, crc32c_fold_width());
  return ~(width > 0 ? crc32c_fold(~value, source, bytes, width)
                     : update_table(~value, source, bytes));
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
  update_xxh3(&state_->hash, data, bytes);
}

std::string Xxh3::take() {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(&state_->hash));
  XXH3_128bits_reset(&state_->hash);
  return {reinterpret_cast<const char*>(canonical.digest),
          sizeof(canonical.digest)};
}

}  // namespace plait
