#include "writer.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "aligned_buffer.hpp"
#include "checksum.hpp"
#include "errors.hpp"
#include "file.hpp"
#include "rate_limit.hpp"
#include "workers.hpp"

namespace plait {
namespace {

// The header and the pieces in file order, without empty ones.
std::vector<Piece> layout(std::string_view header, std::vector<Piece> pieces,
                          uint64_t file_bytes) {
  pieces.push_back(
      {reinterpret_cast<uintptr_t>(header.data()), header.size(), uint64_t{0}});
  pieces.erase(std::remove_if(pieces.begin(), pieces.end(),
                              [](const Piece& p) { return p.bytes == 0; }),
               pieces.end());
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
    return a.file_offset < b.file_offset;
  });
  uint64_t end = 0;
  for (const Piece& piece : pieces) {
    const std::string name = "write_file: the piece at offset " +
                             std::to_string(piece.file_offset) + " of " +
                             std::to_string(piece.bytes) + " bytes ";
    if (piece.file_offset > file_bytes ||
        piece.bytes > file_bytes - piece.file_offset) {
      throw std::invalid_argument(name + "ends after file_bytes " +
                                  std::to_string(file_bytes));
    }
    if (piece.file_offset < end) {
      throw std::invalid_argument(name + "overlaps the one before it (or the " +
                                  "header), which ends at " +
                                  std::to_string(end));
    }
    if (piece.address == 0) {
      throw std::invalid_argument(name + "has address 0");
    }
    end = piece.file_offset + piece.bytes;
  }
  return pieces;
}

// Blocks out of pieces in memory. Those that lie in one piece are taken from
// there, where direct I/O accepts the address, others put together.
class PieceSource final : public BlockSource {
 public:
  PieceSource(std::vector<Piece> pieces, const WriteOptions& options)
      : pieces_(std::move(pieces)), block_bytes_(options.block_bytes) {
    for (int i = 0; i < options.threads; ++i) {
      buffers_.emplace_back(block_bytes_);
    }
  }

  const char* block(int worker, uint64_t block, size_t bytes,
                    uint32_t* crc) override {
    const char* const data = find(worker, block, bytes);
    *crc = crc32c(data, bytes);
    return data;
  }

  void begin(bool) override {}
  void written(uint64_t) override {}
  void give_up(std::exception_ptr) override {}  // Nobody ever waits.

 private:
  using Iterator = std::vector<Piece>::const_iterator;

  const char* find(int worker, uint64_t block, size_t bytes) {
    const uint64_t begin = block * block_bytes_;
    const char* source = in_one_piece(begin, bytes);
    if (source != nullptr &&
        is_aligned(reinterpret_cast<uintptr_t>(source), bytes)) {
      return source;
    }
    char* buffer = buffers_[static_cast<size_t>(worker)].data();
    assemble(begin, bytes, buffer);
    const uint64_t padded = round_up(bytes, kDirectAlignment);
    std::memset(buffer + bytes, 0, padded - bytes);
    return buffer;
  }

  // The first piece that ends after `offset`.
  Iterator first_after(uint64_t offset) const {
    return std::partition_point(
        pieces_.begin(), pieces_.end(), [offset](const Piece& piece) {
          return piece.file_offset + piece.bytes <= offset;
        });
  }

  // Where the range lies in memory if one piece holds it all, else null.
  const char* in_one_piece(uint64_t begin, uint64_t bytes) const {
    const Iterator piece = first_after(begin);
    if (piece == pieces_.end() || piece->file_offset > begin ||
        piece->file_offset + piece->bytes < begin + bytes) {
      return nullptr;
    }
    return reinterpret_cast<const char*>(piece->address + begin -
                                         piece->file_offset);
  }

  // Copies what the pieces hold of the range into `buffer`, zeros between.
  void assemble(uint64_t begin, uint64_t bytes, char* buffer) const {
    const uint64_t end = begin + bytes;
    uint64_t at = begin;
    for (Iterator piece = first_after(begin);
         piece != pieces_.end() && piece->file_offset < end; ++piece) {
      const uint64_t from = std::max(begin, piece->file_offset);
      const uint64_t to = std::min(end, piece->file_offset + piece->bytes);
      std::memset(buffer + (at - begin), 0, from - at);
      std::memcpy(buffer + (from - begin),
                  reinterpret_cast<const char*>(piece->address + from -
                                                piece->file_offset),
                  to - from);
      at = to;
    }
    std::memset(buffer + (at - begin), 0, end - at);
  }

  const std::vector<Piece> pieces_;
  const uint64_t block_bytes_;
  std::vector<AlignedBuffer> buffers_;  // One per worker.
};

// The old file, or null when there is another reference to it, or it cannot be
// opened or asked: all of these only mean that a new one is needed. Not
// blocking: a reader may have a lease on it.
std::unique_ptr<File> open_old(Io& io, const std::string& path) {
  try {
    auto file = std::make_unique<File>(io, path,
                                       O_WRONLY | O_NOFOLLOW | O_NONBLOCK);
    return file->is_sole() ? std::move(file) : nullptr;
  } catch (const std::system_error&) {
    return nullptr;
  }
}

std::unique_ptr<File> open_target(Io& io, const std::string& path, bool over,
                                  bool* reused) {
  std::unique_ptr<File> file = over ? open_old(io, path) : nullptr;
  *reused = file != nullptr;
  if (over && !file) {
    check("unlink", path, [&] { return io.unlink(path); });
  }
  if (!file) {
    file =
        std::make_unique<File>(io, path, O_WRONLY | O_CREAT | O_EXCL, 0600);
  }
  return file;
}

}  // namespace

WriteResult write_blocks(Io& io, const std::string& path, BlockSource& source,
                         uint64_t file_bytes, const WriteOptions& options) {
  check_transfer("write_file", options.block_bytes, options.threads);
  const uint64_t block_bytes = options.block_bytes;
  const uint64_t num_blocks = (file_bytes + block_bytes - 1) / block_bytes;
  WriteResult result;
  result.crcs.resize(num_blocks);  // Each element has one writer.
  RateLimit limit(options.rate_limit);
  const std::unique_ptr<File> opened =
      open_target(io, path, options.over, &result.reused);
  File& file = *opened;
  const auto write_block = [&](int worker, uint64_t block) {
    const uint64_t begin = block * block_bytes;
    const uint64_t bytes = std::min(block_bytes, file_bytes - begin);
    try {
      const char* data =
          source.block(worker, block, bytes, &result.crcs[block]);
      limit.take(bytes);
      const bool direct = file.direct();
      const size_t padded = direct ? round_up(bytes, kDirectAlignment) : bytes;
      file.write_at(data, padded, begin);
      source.written(block);
    } catch (...) {
      source.give_up(std::current_exception());
      throw;
    }
  };
  try {
    if (options.direct) {
      file.try_direct();
    }
    file.allocate(file_bytes);
    source.begin(file.is_copied());
    Workers workers(options.threads, "plait-write", num_blocks, write_block,
                    options.priority);
    workers.close();
    file.truncate(file_bytes);
    file.sync_data();
    file.close();
  } catch (const std::exception&) {
    io.unlink(path);  // Best effort: the first failure is the one to report.
    throw;
  }
  result.direct = file.direct();
  result.fallback_reason = file.fallback_reason();
  return result;
}

WriteResult write_file(Io& io, const std::string& path, std::string_view header,
                       std::vector<Piece> pieces, uint64_t file_bytes,
                       const WriteOptions& options) {
  check_transfer("write_file", options.block_bytes, options.threads);
  PieceSource source(layout(header, std::move(pieces), file_bytes), options);
  return write_blocks(io, path, source, file_bytes, options);
}

}  // namespace plait
