#include "file.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/vfs.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <utility>

#include "errors.hpp"

namespace plait {
namespace {

// Linux moves at most 2 GiB - 4 KiB in one call; this stays aligned below it.
constexpr size_t kMaxTransfer = size_t{1} << 30;
// A short direct transfer is taken up to its last whole page; more attempts
// without a page of progress than this are a failure.
constexpr int kMaxStalls = 8;

bool refuses_direct(int64_t result) {
  return result == -EINVAL || result == -EOPNOTSUPP;
}

}  // namespace

void check_transfer(const std::string& call, uint64_t block_bytes,
                    int threads) {
  if (block_bytes == 0 || block_bytes % kDirectAlignment != 0) {
    throw std::invalid_argument(call + ": block_bytes is " +
                                std::to_string(block_bytes) +
                                ", must be a positive multiple of 4096");
  }
  if (threads < 1) {
    throw std::invalid_argument(call + ": threads is " +
                                std::to_string(threads) + ", must be >= 1");
  }
}

File::File(Io& io, std::string path, int flags, mode_t mode)
    : io_(io), path_(std::move(path)) {
  fd_ = static_cast<int>(
      check("open", path_, [&] { return io_.open(path_, flags, mode); }));
}

File::~File() {
  if (fd_ >= 0) {
    io_.close(fd_);  // Only after a failure, which is already on its way.
  }
}

bool File::try_direct() {
  int64_t refused = 0;
  check("set_direct", path_, [&] {
    const int64_t result = io_.set_direct(fd_, true);
    refused = refuses_direct(result) ? -result : 0;
    return refused != 0 ? 0 : result;
  });
  if (refused != 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    fallback_reason_ = std::string("O_DIRECT refused: ") +
                       std::strerror(static_cast<int>(refused));
    return false;
  }
  direct_ = true;
  return true;
}

std::string File::fallback_reason() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return fallback_reason_;
}

void File::leave_direct(const char* operation, int error) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!direct_) {
    return;  // Another thread was first.
  }
  check("set_direct", path_, [&] { return io_.set_direct(fd_, false); });
  fallback_reason_ =
      std::string("direct ") + operation + " refused: " + std::strerror(error);
  direct_ = false;
}

void File::write_at(const void* data, size_t bytes, uint64_t offset) {
  const char* source = static_cast<const char*>(data);
  size_t done = 0;
  int stalls = 0;
  while (done < bytes) {
    const bool direct = direct_;
    const size_t most = std::min(bytes - done, kMaxTransfer);
    int64_t moved = 0;
    const auto transfer = [&] {
      moved = io_.pwrite(fd_, source + done, most, offset + done);
      return direct && refuses_direct(moved) ? 0 : moved;
    };
    check("pwrite", path_, transfer);
    if (moved < 0) {
      leave_direct("pwrite", static_cast<int>(-moved));
      continue;
    }
    size_t step = static_cast<size_t>(moved);
    if (direct && done + step < bytes) {
      step = step / kDirectAlignment * kDirectAlignment;
    }
    stalls = step == 0 ? stalls + 1 : 0;
    if (stalls > kMaxStalls) {
      throw_errno(EIO, "pwrite without progress", path_);
    }
    done += step;
  }
}

size_t File::read_at(void* data, size_t bytes, size_t capacity,
                     uint64_t offset) {
  char* target = static_cast<char*>(data);
  size_t done = 0;
  int stalls = 0;
  while (done < bytes) {
    const bool direct = direct_;
    const size_t wanted = direct ? capacity - done : bytes - done;
    const size_t most = std::min(wanted, kMaxTransfer);
    int64_t moved = 0;
    const auto transfer = [&] {
      moved = io_.pread(fd_, target + done, most, offset + done);
      return direct && refuses_direct(moved) ? 0 : moved;
    };
    check("pread", path_, transfer);
    if (moved < 0) {
      leave_direct("pread", static_cast<int>(-moved));
      continue;
    }
    if (moved == 0) {
      break;  // The file ends here.
    }
    size_t step = static_cast<size_t>(moved);
    if (direct && done + step < bytes) {
      step = step / kDirectAlignment * kDirectAlignment;
    }
    stalls = step == 0 ? stalls + 1 : 0;
    if (stalls > kMaxStalls) {
      break;  // Only the end of a file stays unaligned.
    }
    done += step;
  }
  return std::min(done, bytes);
}

uint64_t File::size() const {
  return static_cast<uint64_t>(
      check("fstat", path_, [&] { return io_.file_size(fd_); }));
}

bool File::is_sole() const {
  return check("is_sole", path_, [&] { return io_.is_sole(fd_); }) == 1;
}

bool File::is_copied() const {
  struct statfs kind = {};
  return !direct_ || (::fstatfs(fd_, &kind) == 0 &&
                      (kind.f_type == TMPFS_MAGIC || kind.f_type == RAMFS_MAGIC));
}

void File::allocate(uint64_t bytes) {
  if (bytes == 0) {
    return;
  }
  check("fallocate", path_, [&] {
    const int64_t result = io_.fallocate(fd_, bytes);
    return result == -EOPNOTSUPP || result == -ENOSYS ? 0 : result;
  });
}

void File::truncate(uint64_t bytes) {
  check("ftruncate", path_, [&] { return io_.ftruncate(fd_, bytes); });
}

void File::sync() {
  check("fsync", path_, [&] { return io_.fsync(fd_); });
}

void File::sync_data() {
  check("fdatasync", path_, [&] { return io_.fdatasync(fd_); });
}

void File::close() {
  const int64_t result = io_.close(std::exchange(fd_, -1));
  // Linux has closed the descriptor when it reports EINTR; again would be
  // wrong.
  if (result < 0 && result != -EINTR) {
    throw_errno(static_cast<int>(-result), "close", path_);
  }
}

void write_small(Io& io, const std::string& path, std::string_view data,
                 bool exclusive) {
  File file(io, path, O_WRONLY | O_CREAT | (exclusive ? O_EXCL : O_TRUNC),
            0600);
  try {
    file.write_at(data.data(), data.size(), 0);
    file.sync();
    file.close();
  } catch (const std::exception&) {
    if (exclusive) {
      io.unlink(path);  // Best effort: the first failure is the one to report.
    }
    throw;
  }
}

std::string read_small(Io& io, const std::string& path, uint64_t max_bytes) {
  // Not blocking: a FIFO in the place of the file is an empty one.
  File file(io, path, O_RDONLY | O_NONBLOCK);
  const uint64_t size = file.size();
  if (size > max_bytes) {
    throw_errno(EFBIG, "read more than " + std::to_string(max_bytes) + " bytes",
                path);
  }
  std::string data(size, '\0');
  data.resize(file.read_at(data.data(), size, size, 0));
  file.close();
  return data;
}

}  // namespace plait
