#include "lazy_parts.hpp"

#include <algorithm>
#include <cstring>

namespace plait {
namespace {

uint64_t address_of(const StagePart& part) {
  return reinterpret_cast<uintptr_t>(part.source);
}

}  // namespace

LazyParts::LazyParts(const std::vector<StagePart>& parts)
    : parts_(parts), samples_(parts.size()) {
  for (size_t i = 0; i < parts.size(); ++i) {
    const StagePart& part = parts[i];
    if (!part.lazy) {
      continue;
    }
    by_source_.push_back(i);
    Sample& sample = samples_[i];
    sample.bytes = std::min<uint64_t>(sizeof(sample.data), part.bytes);
    // Anywhere, but not at the same place of every part (Knuth's multiplier).
    sample.at = (i * 2654435761U) % (part.bytes - sample.bytes + 1);
    // All at once: in memory that training has left, each is a walk of the page
    // tables and a miss, which the call would wait for one after the other.
    __builtin_prefetch(part.source + sample.at);
    __builtin_prefetch(part.source + sample.at + sample.bytes - 1);
  }
  for (const size_t i : by_source_) {
    Sample& sample = samples_[i];
    std::memcpy(sample.data, parts[i].source + sample.at, sample.bytes);
  }
  std::sort(by_source_.begin(), by_source_.end(), [this](size_t a, size_t b) {
    return address_of(parts_[a]) < address_of(parts_[b]);
  });
}

bool LazyParts::is_changed(size_t index, const char* copy) const {
  const Sample& sample = samples_[index];
  const char* source = parts_[index].source;
  return std::memcmp(copy + sample.at, sample.data, sample.bytes) != 0 ||
         std::memcmp(source + sample.at, sample.data, sample.bytes) != 0;
}

std::vector<size_t> LazyParts::overlapping(
    const std::vector<Range>& ranges) const {
  std::vector<size_t> found;
  for (const auto& [address, bytes] : ranges) {
    // No part is longer than kPartBytes.
    const auto first = std::lower_bound(
        by_source_.begin(), by_source_.end(),
        address - std::min(address, kPartBytes),
        [this](size_t i, uint64_t at) { return address_of(parts_[i]) < at; });
    for (auto it = first; it != by_source_.end(); ++it) {
      const StagePart& part = parts_[*it];
      if (address_of(part) >= address + bytes) {
        break;
      }
      if (address_of(part) + part.bytes > address) {
        found.push_back(*it);
      }
    }
  }
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

}  // namespace plait
