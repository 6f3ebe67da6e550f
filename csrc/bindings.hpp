// What the files that bind to Python share. Nothing else includes pybind11.
#ifndef PLAIT_CSRC_BINDINGS_HPP_
#define PLAIT_CSRC_BINDINGS_HPP_

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <filesystem>
#include <string>
#include <tuple>
#include <vector>

#include "writer.hpp"

namespace plait {

using Path = std::filesystem::path;
using Unlocked = pybind11::call_guard<pybind11::gil_scoped_release>;
using Triples = std::vector<std::tuple<uint64_t, uint64_t, uint64_t>>;

template <typename Item>
std::vector<Item> items(const Triples& triples) {
  std::vector<Item> result;
  result.reserve(triples.size());
  for (const auto& [a, b, c] : triples) {
    result.push_back(Item{a, b, c});
  }
  return result;
}

// "normal", "low" or "idle"; throws std::invalid_argument.
Priority priority_of(int nice, const std::string& io_priority);

// The staging pool, and stages over it (module_memory.cpp).
void bind_memory(pybind11::module_& module);

}  // namespace plait

#endif  // PLAIT_CSRC_BINDINGS_HPP_
