#include "errors.hpp"

#include <system_error>
#include <utility>

namespace plait {

ChecksumError::ChecksumError(const std::string& message, std::string path,
                             int64_t block)
    : std::runtime_error(message), path_(std::move(path)), block_(block) {}

void throw_errno(int error, const std::string& operation,
                 const std::string& path) {
  throw std::system_error(error, std::generic_category(),
                          operation + " '" + path + "'");
}

}  // namespace plait
