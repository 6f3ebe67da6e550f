#include "stream_copy.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace plait {

#if defined(__x86_64__)

namespace {

constexpr size_t kLine = 64;
// Lines of four pages in turn: at each new page the prefetcher stops, and the
// processor waits for its address to be translated (under a hypervisor up to
// 24 loads), so four such waits overlap.
constexpr size_t kPage = 4096;
constexpr size_t kPages = 4;

// A whole line, to an address that is one's.
__attribute__((target("avx2"))) void line_by_32(char* to, const char* from) {
  const auto* source = reinterpret_cast<const __m256i*>(from);
  auto* target = reinterpret_cast<__m256i*>(to);
  const __m256i low = _mm256_loadu_si256(source);
  const __m256i high = _mm256_loadu_si256(source + 1);
  _mm256_stream_si256(target, low);
  _mm256_stream_si256(target + 1, high);
}

__attribute__((target("avx2"))) void pages_by_32(char* to, const char* from) {
  for (size_t i = 0; i < kPage; i += kLine) {
    for (size_t page = 0; page < kPages; ++page) {
      line_by_32(to + page * kPage + i, from + page * kPage + i);
    }
  }
}

// The same, a line a store: no half of one is ever on its way.
__attribute__((target("avx512f"))) void line_by_64(char* to, const char* from) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
}

__attribute__((target("avx512f"))) void pages_by_64(char* to,
                                                    const char* from) {
  for (size_t i = 0; i < kPage; i += kLine) {
    for (size_t page = 0; page < kPages; ++page) {
      line_by_64(to + page * kPage + i, from + page * kPage + i);
    }
  }
}

// How many bytes a store has. The first processors with wide vectors lowered
// their clock for them.
int widest() {
  if (__builtin_cpu_supports("avx2") == 0) {
    return 0;
  }
  const bool wide = __builtin_cpu_supports("avx512f") != 0 &&
                    __builtin_cpu_supports("vpclmulqdq") != 0;
  return wide ? 64 : 32;
}

}  // namespace

void stream_copy(void* to, const void* from, size_t bytes, int width) {
  auto* target = static_cast<char*>(to);
  const auto* source = static_cast<const char*>(from);
  width = std::min(width, widest());
  if (bytes >= 4 * kLine && width >= 32) {
    const size_t before = -reinterpret_cast<uintptr_t>(target) % kLine;
    const size_t end = before + (bytes - before) / kLine * kLine;
    const auto line = width == 64 ? line_by_64 : line_by_32;
    const auto pages = width == 64 ? pages_by_64 : pages_by_32;
    std::memcpy(target, source, before);
    size_t at = before;
    for (; end - at >= kPages * kPage; at += kPages * kPage) {
      pages(target + at, source + at);
    }
    for (; at < end; at += kLine) {
      line(target + at, source + at);
    }
    _mm_sfence();
    target += end;
    source += end;
    bytes -= end;
  }
  std::memcpy(target, source, bytes);
}

#else

void stream_copy(void* to, const void* from, size_t bytes, int) {
  std::memcpy(to, from, bytes);
}

#endif  // defined(__x86_64__)

}  // namespace plait
