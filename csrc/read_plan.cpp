#include "read_plan.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "file.hpp"

namespace plait {
namespace {

void check_arguments(uint64_t file_bytes, size_t num_crcs,
                     const ReadOptions& options) {
  check_transfer("read_ranges", options.block_bytes, options.threads);
  const uint64_t num_blocks =
      (file_bytes + options.block_bytes - 1) / options.block_bytes;
  if (num_crcs != num_blocks) {
    throw std::invalid_argument("read_ranges: " + std::to_string(num_crcs) +
                                " crcs, but " + std::to_string(file_bytes) +
                                " bytes are " + std::to_string(num_blocks) +
                                " blocks");
  }
}

}  // namespace

std::vector<ReadPart> plan_reads(const std::vector<ReadRequest>& requests,
                                 uint64_t file_bytes, size_t num_crcs,
                                 const ReadOptions& options) {
  check_arguments(file_bytes, num_crcs, options);
  const uint64_t block_bytes = options.block_bytes;
  std::vector<ReadPart> parts;
  for (const ReadRequest& request : requests) {
    if (request.file_offset > file_bytes ||
        request.bytes > file_bytes - request.file_offset) {
      throw std::invalid_argument(
          "read_ranges: the range at " + std::to_string(request.file_offset) +
          " of " + std::to_string(request.bytes) + " bytes ends after " +
          std::to_string(file_bytes));
    }
    if (request.address == 0 && request.bytes > 0) {
      throw std::invalid_argument("read_ranges: the range at " +
                                  std::to_string(request.file_offset) +
                                  " has address 0");
    }
    uint64_t done = 0;
    while (done < request.bytes) {
      const uint64_t at = request.file_offset + done;
      const uint64_t offset = at % block_bytes;
      const uint64_t bytes =
          std::min(block_bytes - offset, request.bytes - done);
      parts.push_back({at / block_bytes, offset, bytes,
                       reinterpret_cast<char*>(request.address + done)});
      done += bytes;
    }
  }
  std::stable_sort(
      parts.begin(), parts.end(),
      [](const ReadPart& a, const ReadPart& b) { return a.block < b.block; });
  return parts;
}

}  // namespace plait
