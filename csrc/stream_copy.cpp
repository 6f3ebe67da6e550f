#include "stream_copy.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

namespace plait {

#if defined(__x86_64__)

namespace {

constexpr size_t kLine = 64;

// Whole lines, to an address that is one's.
__attribute__((target("avx2"))) void stream_lines(char* to, const char* from,
                                                  size_t bytes) {
  for (size_t i = 0; i < bytes; i += kLine) {
    const auto* source = reinterpret_cast<const __m256i*>(from + i);
    auto* target = reinterpret_cast<__m256i*>(to + i);
    const __m256i low = _mm256_loadu_si256(source);
    const __m256i high = _mm256_loadu_si256(source + 1);
    _mm256_stream_si256(target, low);
    _mm256_stream_si256(target + 1, high);
  }
  _mm_sfence();
}

// The same, a line a store: no half of one is ever on its way.
__attribute__((target("avx512f"))) void stream_lines_512(char* to,
                                                         const char* from,
                                                         size_t bytes) {
  for (size_t i = 0; i < bytes; i += kLine) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i),
                        _mm512_loadu_si512(from + i));
  }
  _mm_sfence();
}

}  // namespace

void stream_copy(void* to, const void* from, size_t bytes) {
  auto* target = static_cast<char*>(to);
  const auto* source = static_cast<const char*>(from);
  if (bytes >= 4 * kLine && __builtin_cpu_supports("avx2") != 0) {
    const size_t before = -reinterpret_cast<uintptr_t>(target) % kLine;
    const size_t lines = (bytes - before) / kLine * kLine;
    std::memcpy(target, source, before);
    // The first processors with wide vectors lowered their clock for them.
    const bool wide = __builtin_cpu_supports("avx512f") != 0 &&
                      __builtin_cpu_supports("vpclmulqdq") != 0;
    (wide ? stream_lines_512 : stream_lines)(target + before, source + before,
                                             lines);
    target += before + lines;
    source += before + lines;
    bytes -= before + lines;
  }
  std::memcpy(target, source, bytes);
}

#else

void stream_copy(void* to, const void* from, size_t bytes) {
  std::memcpy(to, from, bytes);
}

#endif  // defined(__x86_64__)

}  // namespace plait
