#include "crc32c_fold.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>
#endif

namespace plait {

#if defined(__x86_64__)

namespace {

uint64_t load64(const uint8_t* data) {
  uint64_t word;
  std::memcpy(&word, data, sizeof(word));
  return word;
}

// x to the power of `bits` modulo the polynomial, bits reflected.
constexpr uint32_t power_of_x(int bits) {
  uint32_t power = 0x80000000;
  for (; bits > 0; --bits) {
    power = (power >> 1) ^ ((power & 1) != 0 ? kCrc32cPolynomial : 0);
  }
  return power;
}

// What the halves of 16 bytes are multiplied with to stand `kBits` bits earlier
// in the data: the near half by x^kBits, the far one by x^(kBits + 64), both
// less the 33 that a reflected product of 64 by 32 bits is out of place.
template <int kBits>
struct Ahead {
  static constexpr int64_t kNear = power_of_x(kBits - 33);
  static constexpr int64_t kFar = power_of_x(kBits + 31);
};

__attribute__((target("sse4.2"))) uint32_t update_sse42(uint32_t crc,
                                                        const uint8_t* data,
                                                        size_t bytes) {
  uint64_t lane = crc;
  for (; bytes >= 8; data += 8, bytes -= 8) {
    lane = _mm_crc32_u64(lane, load64(data));
  }
  crc = static_cast<uint32_t>(lane);
  for (; bytes > 0; ++data, --bytes) {
    crc = _mm_crc32_u8(crc, *data);
  }
  return crc;
}

__attribute__((target("sse4.2,pclmul")))
__m128i load128(const uint8_t* data) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
}

__attribute__((target("avx2,sse4.2,pclmul,vpclmulqdq")))
__m256i load256(const uint8_t* data) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data));
}

__attribute__((target("sse4.2,pclmul")))
__m128i fold(__m128i sum, __m128i ahead, __m128i next) {
  const __m128i far = _mm_clmulepi64_si128(sum, ahead, 0x00);
  const __m128i near = _mm_clmulepi64_si128(sum, ahead, 0x11);
  return _mm_xor_si128(_mm_xor_si128(far, near), next);
}

__attribute__((target("avx2,sse4.2,pclmul,vpclmulqdq")))
__m256i fold(__m256i sum, __m256i ahead, __m256i next) {
  const __m256i far = _mm256_clmulepi64_epi128(sum, ahead, 0x00);
  const __m256i near = _mm256_clmulepi64_epi128(sum, ahead, 0x11);
  return _mm256_xor_si256(_mm256_xor_si256(far, near), next);
}

// Two products and three sums in three instructions.
__attribute__((target("avx512f,vpclmulqdq")))
__m512i fold(__m512i sum, __m512i ahead, __m512i next) {
  const __m512i far = _mm512_clmulepi64_epi128(sum, ahead, 0x00);
  const __m512i near = _mm512_clmulepi64_epi128(sum, ahead, 0x11);
  return _mm512_ternarylogic_epi64(far, near, next, 0x96);
}

// The CRC of the sums that stand for all data so far, one behind the other.
__attribute__((target("sse4.2,pclmul")))
uint32_t crc_of(const void* sums, size_t bytes) {
  const auto* data = static_cast<const uint8_t*>(sums);
  const __m128i by_one = _mm_set_epi64x(Ahead<128>::kNear, Ahead<128>::kFar);
  __m128i all = load128(data);
  for (size_t i = 16; i < bytes; i += 16) {
    all = fold(all, by_one, load128(data + i));
  }
  const auto far = static_cast<uint64_t>(_mm_cvtsi128_si64(all));
  const auto near = static_cast<uint64_t>(_mm_extract_epi64(all, 1));
  return static_cast<uint32_t>(_mm_crc32_u64(_mm_crc32_u64(0, far), near));
}

// Four sums, each of every fourth 16 bytes, so that the multiplier never waits.
// One front moves through memory, as the prefetcher likes it: three lanes of
// the crc32 instruction side by side were half as fast out of cache.
__attribute__((target("sse4.2,pclmul")))
uint32_t update_fold(uint32_t crc, const uint8_t* data,
                                size_t bytes) {
  if (bytes < 64) {
    return update_sse42(crc, data, bytes);
  }
  const __m128i ahead = _mm_set_epi64x(Ahead<512>::kNear, Ahead<512>::kFar);
  __m128i sum[4];
  for (int i = 0; i < 4; ++i) {
    sum[i] = load128(data + 16 * i);
  }
  sum[0] = _mm_xor_si128(sum[0], _mm_cvtsi32_si128(static_cast<int>(crc)));
  for (data += 64, bytes -= 64; bytes >= 64; data += 64, bytes -= 64) {
    for (int i = 0; i < 4; ++i) {
      sum[i] = fold(sum[i], ahead, load128(data + 16 * i));
    }
  }
  return update_sse42(crc_of(sum, sizeof(sum)), data, bytes);
}

// The same by twice as many bytes an instruction.
__attribute__((target("avx2,sse4.2,pclmul,vpclmulqdq")))
uint32_t update_wide(uint32_t crc, const uint8_t* data,
                                     size_t bytes) {
  if (bytes < 128) {
    return update_fold(crc, data, bytes);
  }
  constexpr int64_t kNear = Ahead<1024>::kNear;
  constexpr int64_t kFar = Ahead<1024>::kFar;
  const __m256i ahead = _mm256_set_epi64x(kNear, kFar, kNear, kFar);
  __m256i sum[4];
  for (int i = 0; i < 4; ++i) {
    sum[i] = load256(data + 32 * i);
  }
  sum[0] = _mm256_xor_si256(sum[0], _mm256_set_epi64x(0, 0, 0, crc));
  for (data += 128, bytes -= 128; bytes >= 128; data += 128, bytes -= 128) {
    for (int i = 0; i < 4; ++i) {
      sum[i] = fold(sum[i], ahead, load256(data + 32 * i));
    }
  }
  return update_sse42(crc_of(sum, sizeof(sum)), data, bytes);
}

// And by four times as many.
__attribute__((target("avx512f,avx2,sse4.2,pclmul,vpclmulqdq")))
uint32_t update_widest(uint32_t crc, const uint8_t* data,
                                       size_t bytes) {
  if (bytes < 256) {
    return update_wide(crc, data, bytes);
  }
  constexpr int64_t kNear = Ahead<2048>::kNear;
  constexpr int64_t kFar = Ahead<2048>::kFar;
  const __m512i ahead = _mm512_set_epi64(kNear, kFar, kNear, kFar,  //
                                         kNear, kFar, kNear, kFar);
  __m512i sum[4];
  for (int i = 0; i < 4; ++i) {
    sum[i] = _mm512_loadu_si512(data + 64 * i);
  }
  sum[0] = _mm512_xor_si512(sum[0], _mm512_set_epi64(0, 0, 0, 0, 0, 0, 0, crc));
  for (data += 256, bytes -= 256; bytes >= 256; data += 256, bytes -= 256) {
    for (int i = 0; i < 4; ++i) {
      sum[i] = fold(sum[i], ahead, _mm512_loadu_si512(data + 64 * i));
    }
  }
  return update_wide(crc_of(sum, sizeof(sum)), data, bytes);
}

}  // namespace

int crc32c_fold_width() {
  if (__builtin_cpu_supports("sse4.2") == 0 ||
      __builtin_cpu_supports("pclmul") == 0) {
    return 0;
  }
  if (__builtin_cpu_supports("vpclmulqdq") == 0 ||
      __builtin_cpu_supports("avx2") == 0) {
    return 16;
  }
  return __builtin_cpu_supports("avx512f") != 0 ? 64 : 32;
}

uint32_t crc32c_fold(uint32_t crc, const uint8_t* data, size_t bytes,
                     int width) {
  if (width == 64) {
    return update_widest(crc, data, bytes);
  }
  return width == 32 ? update_wide(crc, data, bytes)
                     : update_fold(crc, data, bytes);
}

#else

int crc32c_fold_width() { return 0; }

uint32_t crc32c_fold(uint32_t crc, const uint8_t*, size_t, int) { return crc; }

#endif  // defined(__x86_64__)

}  // namespace plait
