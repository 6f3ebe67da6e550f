// How failures travel to Python. Not a logger: nothing is caught here.
//
// Four kinds: std::invalid_argument for what the caller did (ValueError),
// std::system_error for what the machine did (OSError with errno, operation
// and path), ChecksumError for bytes that are not the ones once written,
// TornError for memory that changed before it was captured.
#ifndef PLAIT_CSRC_ERRORS_HPP_
#define PLAIT_CSRC_ERRORS_HPP_

#include <cerrno>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace plait {

// A file whose size or content differs from what was recorded at its writing.
class ChecksumError : public std::runtime_error {
 public:
  // `block` is the index of the damaged block, -1 when the file's size is
  // wrong.
  ChecksumError(const std::string& message, std::string path, int64_t block);

  const std::string& path() const { return path_; }
  int64_t block() const { return block_; }

 private:
  std::string path_;
  int64_t block_;
};

// Memory that was to be captured as it was at a call and was changed before.
class TornError : public std::runtime_error {
 public:
  TornError(const std::string& message, int64_t piece)
      : std::runtime_error(message), piece_(piece) {}

  // The index of the changed piece.
  int64_t piece() const { return piece_; }

 private:
  int64_t piece_;
};

// Throws std::system_error(error, "operation 'path'").
[[noreturn]] void throw_errno(int error, const std::string& operation,
                              const std::string& path);

// Repeats `call` (which returns >= 0 or -errno) while it is interrupted, then
// returns its result or throws. The bound is far above any real signal rate
// and keeps a call that is interrupted for ever from hanging.
template <typename Call>
int64_t check(const char* operation, const std::string& path, Call call) {
  constexpr int kMaxInterrupts = 1000;
  int64_t result = call();
  for (int i = 0; result == -EINTR && i < kMaxInterrupts; ++i) {
    result = call();
  }
  if (result < 0) {
    throw_errno(static_cast<int>(-result), operation, path);
  }
  return result;
}

}  // namespace plait

#endif  // PLAIT_CSRC_ERRORS_HPP_
