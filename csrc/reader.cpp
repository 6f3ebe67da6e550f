#include "reader.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "aligned_buffer.hpp"
#include "checksum.hpp"
#include "errors.hpp"
#include "file.hpp"
#include "stream_copy.hpp"
#include "workers.hpp"

namespace plait {
namespace {

// What is read at once into a buffer: all buffers together stay in the last
// cache, and take little memory that was never touched before.
constexpr uint64_t kStepBytes = uint64_t{1} << 20;

// What one request wants of one block.
struct Part {
  uint64_t block;
  uint64_t offset;  // In the block.
  uint64_t bytes;
  char* target;
};

void check_arguments(uint64_t file_bytes, size_t num_crcs,
                     const ReadOptions& options) {
  if (options.block_bytes == 0 || options.block_bytes % kDirectAlignment != 0) {
    throw std::invalid_argument("read_ranges: block_bytes is " +
                                std::to_string(options.block_bytes) +
                                ", must be a positive multiple of 4096");
  }
  if (options.threads < 1) {
    throw std::invalid_argument("read_ranges: threads is " +
                                std::to_string(options.threads) +
                                ", must be >= 1");
  }
  const uint64_t num_blocks =
      (file_bytes + options.block_bytes - 1) / options.block_bytes;
  if (num_crcs != num_blocks) {
    throw std::invalid_argument("read_ranges: " + std::to_string(num_crcs) +
                                " crcs, but " + std::to_string(file_bytes) +
                                " bytes are " + std::to_string(num_blocks) +
                                " blocks");
  }
}

// Cuts the requests at block boundaries; sorted by block.
std::vector<Part> cut(const std::vector<ReadRequest>& requests,
                      uint64_t file_bytes, uint64_t block_bytes) {
  std::vector<Part> parts;
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
      [](const Part& a, const Part& b) { return a.block < b.block; });
  return parts;
}

// What block workers share. Owns up to two descriptors of the file, since
// direct I/O is a property of the descriptor.
class BlockReader {
 public:
  BlockReader(Io& io, const std::string& path, uint64_t file_bytes,
              const std::vector<uint32_t>& crcs, std::vector<Part> parts,
              const ReadOptions& options)
      : buffered_(io, path, O_RDONLY),
        file_bytes_(file_bytes),
        block_bytes_(options.block_bytes),
        crcs_(crcs),
        parts_(std::move(parts)),
        step_bytes_(std::clamp(round_up(file_bytes_, kDirectAlignment),
                               uint64_t{kDirectAlignment}, kStepBytes)),
        buffers_(static_cast<size_t>(options.threads) * step_bytes_),
        memory_(buffers_.data()) {
    check_size();
    for (size_t i = 0; i < parts_.size(); ++i) {
      if (i == 0 || parts_[i].block != parts_[i - 1].block) {
        starts_.push_back(i);
        bytes_read_ += block_size(parts_[i].block);
      }
    }
    starts_.push_back(parts_.size());
    if (options.direct && num_blocks() > 0) {
      direct_ = std::make_unique<File>(io, path, O_RDONLY);
      direct_->try_direct();
    }
  }

  uint64_t num_blocks() const { return starts_.size() - 1; }  // Touched ones.
  uint64_t bytes_read() const { return bytes_read_; }

  void read_block(int worker, uint64_t index) {
    const Part* begin = parts_.data() + starts_[index];
    const Part* end = parts_.data() + starts_[index + 1];
    const uint64_t block = begin->block;
    const uint64_t bytes = block_size(block);
    const uint64_t offset = block * block_bytes_;
    File* file = &buffered_;
    if (direct_ && direct_->direct() &&
        !buffered_.is_cached(offset, bytes)) {
      file = direct_.get();
    }
    const bool whole = end - begin == 1 && begin->bytes == bytes;
    const auto address = reinterpret_cast<uintptr_t>(begin->target);
    const bool in_place =
        whole && (file == &buffered_ || is_aligned(address, bytes));
    read_in_steps(*file, begin, end, in_place ? nullptr : buffer(worker));
  }

  void close() {
    buffered_.close();
    if (direct_) {
      direct_->close();
    }
  }

 private:
  uint64_t block_size(uint64_t block) const {
    return std::min(block_bytes_, file_bytes_ - block * block_bytes_);
  }

  void check_size() const {
    const uint64_t size = buffered_.size();
    if (size != file_bytes_) {
      throw ChecksumError("'" + buffered_.path() + "' has " +
                              std::to_string(size) + " bytes, expected " +
                              std::to_string(file_bytes_),
                          buffered_.path(), -1);
    }
  }

  char* buffer(int worker) const {
    return memory_ + static_cast<size_t>(worker) * step_bytes_;
  }

  static size_t read(File& file, char* data, uint64_t bytes, uint64_t offset) {
    const size_t capacity =
        file.direct() ? round_up(bytes, kDirectAlignment) : bytes;
    return file.read_at(data, bytes, capacity, offset);
  }

  // Reads a block step by step, so that the checksum finds a step in the cache:
  // through `staged` into the parts, or without it straight into the only one.
  void read_in_steps(File& file, const Part* begin, const Part* end,
                     char* staged) const {
    const uint64_t bytes = block_size(begin->block);
    const uint64_t offset = begin->block * block_bytes_;
    uint32_t crc = 0;
    uint64_t done = 0;
    for (uint64_t step = 0, got = 0; got == step && done < bytes; done += got) {
      step = std::min(step_bytes_, bytes - done);
      char* const data = staged != nullptr ? staged : begin->target + done;
      got = read(file, data, step, offset + done);
      crc = crc32c(data, got, crc);
      for (const Part* part = begin; part != end && staged != nullptr; ++part) {
        const uint64_t from = std::max(part->offset, done);
        const uint64_t to = std::min(part->offset + part->bytes, done + got);
        if (from < to) {
          char* const target = part->target + (from - part->offset);
          if (&file == &buffered_) {  // Where no disk but the cores are slow.
            stream_copy(target, data + (from - done), to - from);
          } else {
            std::memcpy(target, data + (from - done), to - from);
          }
        }
      }
    }
    verify(begin->block, done, crc);
  }

  void verify(uint64_t block, uint64_t bytes, uint32_t crc) const {
    const uint64_t expected = block_size(block);
    if (bytes == expected && crc == crcs_[block]) {
      return;
    }
    const uint64_t offset = block * block_bytes_;
    throw ChecksumError(
        "block " + std::to_string(block) + " (bytes " + std::to_string(offset) +
            " to " + std::to_string(offset + expected) + ") of '" +
            buffered_.path() + "' " +
            (bytes == expected ? "does not match its CRC32C"
                               : "ends after " + std::to_string(bytes)),
        buffered_.path(), static_cast<int64_t>(block));
  }

  File buffered_;
  std::unique_ptr<File> direct_;
  const uint64_t file_bytes_;
  const uint64_t block_bytes_;
  const std::vector<uint32_t>& crcs_;
  const std::vector<Part> parts_;
  std::vector<size_t> starts_;  // First part of each touched block, and an end.
  uint64_t bytes_read_ = 0;
  const uint64_t step_bytes_;
  AlignedBuffer buffers_;  // step_bytes_ a worker.
  char* const memory_;
};

}  // namespace

uint64_t read_ranges(Io& io, const std::string& path, uint64_t file_bytes,
                     const std::vector<uint32_t>& crcs,
                     const std::vector<ReadRequest>& requests,
                     const ReadOptions& options) {
  check_arguments(file_bytes, crcs.size(), options);
  BlockReader reader(io, path, file_bytes, crcs,
                     cut(requests, file_bytes, options.block_bytes), options);
  Workers workers(
      options.threads, "plait-read", reader.num_blocks(),
      [&](int worker, uint64_t index) { reader.read_block(worker, index); });
  workers.close();
  reader.close();
  return reader.bytes_read();
}

}  // namespace plait
