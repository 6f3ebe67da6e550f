#include "reader.hpp"

#include <fcntl.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <thread>

#include "aligned_buffer.hpp"
#include "checksum.hpp"
#include "errors.hpp"
#include "file.hpp"
#include "read_plan.hpp"
#include "resident_pages.hpp"
#include "stream_copy.hpp"
#include "workers.hpp"

namespace plait {
namespace {

// What is read at once into a buffer: all buffers together stay in the last
// cache, and take little memory that was never touched before.
constexpr uint64_t kStepBytes = uint64_t{1} << 20;
// What stays in the second cache from its copy to its checksum.
constexpr uint64_t kPieceBytes = uint64_t{64} << 10;

// What block workers share. Owns up to two descriptors of the file, since
// direct I/O is a property of the descriptor.
class BlockReader {
 public:
  BlockReader(Io& io, const std::string& path, uint64_t file_bytes,
              const std::vector<uint32_t>& crcs, std::vector<ReadPart> parts,
              const ReadOptions& options)
      : buffered_(io, path, O_RDONLY),
        pages_(io, buffered_),
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

  // Threads beyond the processors wait for a disk. Where the page cache has the
  // first and the last block, as it has all then, they would only take turns.
  int useful_threads(int threads) const {
    const uint64_t last = num_blocks() - 1;
    const auto processors =
        static_cast<int>(std::thread::hardware_concurrency());
    const bool no_disk =
        num_blocks() > 0 && processors > 0 && is_cached(0) && is_cached(last);
    return no_disk ? std::min(threads, processors) : threads;
  }

  void read_block(int worker, uint64_t index) {
    const ReadPart* begin = parts_.data() + starts_[index];
    const ReadPart* end = parts_.data() + starts_[index + 1];
    const uint64_t block = begin->block;
    const uint64_t bytes = block_size(block);
    const auto found =
        pages_.use(block * block_bytes_, bytes, [&](const char* data) {
          take_in_place(data, begin, end);
        });
    if (found == ResidentPages::Found::kUsed) {
      return;
    }
    File* file = &buffered_;
    if (direct_ && direct_->direct() &&
        found == ResidentPages::Found::kAbsent) {
      file = direct_.get();
    }
    const bool whole = end - begin == 1 && begin->bytes == bytes;
    const auto address = reinterpret_cast<uintptr_t>(begin->target);
    const bool in_place =
        whole && (file == &buffered_ || is_aligned(address, bytes));
    read_in_steps(*file, begin, end, in_place ? nullptr : buffer(worker));
  }

  void close() {
    pages_.let_go();
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

  bool is_cached(uint64_t index) const {
    const uint64_t block = parts_[starts_[index]].block;
    return pages_.are_resident(block * block_bytes_, block_size(block));
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
  void read_in_steps(File& file, const ReadPart* begin, const ReadPart* end,
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
      if (staged != nullptr) {
        give(begin, end, done, data, got, &file == &buffered_);
      }
    }
    verify(begin->block, done, crc);
  }

  // The same for a block that is in memory.
  void take_in_place(const char* data, const ReadPart* begin,
                     const ReadPart* end) const {
    const uint64_t bytes = block_size(begin->block);
    uint32_t crc = 0;
    for (uint64_t done = 0; done < bytes; done += kPieceBytes) {
      const uint64_t piece = std::min(kPieceBytes, bytes - done);
      give(begin, end, done, data + done, piece, true);
      crc = crc32c(data + done, piece, crc);
    }
    verify(begin->block, bytes, crc);
  }

  // Copies what the parts want of `bytes` at `at` in the block; past the caches
  // where no disk but the cores are slow.
  static void give(const ReadPart* begin, const ReadPart* end, uint64_t at,
                   const char* data, uint64_t bytes, bool past_caches) {
    for (const ReadPart* part = begin; part != end; ++part) {
      const uint64_t from = std::max(part->offset, at);
      const uint64_t to = std::min(part->offset + part->bytes, at + bytes);
      if (from < to) {
        char* const target = part->target + (from - part->offset);
        stream_copy(target, data + (from - at), to - from,
                    past_caches ? kWidest : 0);
      }
    }
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
  ResidentPages pages_;
  std::unique_ptr<File> direct_;
  const uint64_t file_bytes_;
  const uint64_t block_bytes_;
  const std::vector<uint32_t>& crcs_;
  const std::vector<ReadPart> parts_;
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
  BlockReader reader(io, path, file_bytes, crcs,
                     plan_reads(requests, file_bytes, crcs.size(), options),
                     options);
  Workers workers(
      reader.useful_threads(options.threads), "plait-read", reader.num_blocks(),
      [&](int worker, uint64_t index) { reader.read_block(worker, index); });
  workers.close();
  reader.close();
  return reader.bytes_read();
}

}  // namespace plait
