// Named answers about this machine, for reports.
#ifndef PLAIT_CSRC_FACTS_HPP_
#define PLAIT_CSRC_FACTS_HPP_

#include <cstdint>
#include <map>
#include <string>
#include <variant>

namespace plait {

using Facts = std::map<std::string, std::variant<bool, uint64_t, std::string>>;

}  // namespace plait

#endif  // PLAIT_CSRC_FACTS_HPP_
