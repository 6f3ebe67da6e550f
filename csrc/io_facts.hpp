// What the storage under a folder can do, found by trying. For reports only:
// writer and reader find out for themselves.
#ifndef PLAIT_CSRC_IO_FACTS_HPP_
#define PLAIT_CSRC_IO_FACTS_HPP_

#include <string>

#include "facts.hpp"

namespace plait {

// direct_io and io_uring (bool), each with a reason (str) when it is false;
// filesystem (str: "ext4", or its magic number in hex), free_bytes,
// total_bytes. `path` is a folder in which a file may be made; the trial file
// has no name or loses it at once. Throws std::system_error when the folder is
// unusable.
Facts io_facts(const std::string& path);

}  // namespace plait

#endif  // PLAIT_CSRC_IO_FACTS_HPP_
