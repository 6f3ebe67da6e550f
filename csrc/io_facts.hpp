// What the storage under a folder can do, found by trying. For reports only:
// writer and reader find out for themselves.
#ifndef PLAIT_CSRC_IO_FACTS_HPP_
#define PLAIT_CSRC_IO_FACTS_HPP_

#include <cstdint>
#include <string>

namespace plait {

struct IoFacts {
  bool direct_io = false;
  std::string direct_io_reason;  // Why not, or empty.
  bool io_uring = false;
  std::string io_uring_reason;
  std::string filesystem;  // "ext4", or its magic number in hex.
  uint64_t free_bytes = 0;
  uint64_t total_bytes = 0;
};

// `path` is a folder in which a file may be made; the trial file has no name
// or loses it at once. Throws std::system_error when the folder is unusable.
IoFacts io_facts(const std::string& path);

}  // namespace plait

#endif  // PLAIT_CSRC_IO_FACTS_HPP_
