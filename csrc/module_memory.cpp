// The Python face of the staging memory: bindings only, no logic.
#include "bindings.hpp"
#include "stage.hpp"
#include "staging_pool.hpp"

namespace py = pybind11;

namespace plait {
namespace {

using py::literals::operator""_a;

// A part of a pool as a buffer; keeps the memory alive.
struct PoolView {
  std::shared_ptr<HugeMapping> mapping;
  uint64_t offset;
  uint64_t bytes;
};

template <auto Method>
void copy(const StagingPool& pool, const Triples& copies) {
  (pool.*Method)(items<Copy>(copies));
}

void bind_pool(py::module_& module) {
  py::class_<PoolView>(module, "PoolView", py::buffer_protocol())
      .def_buffer([](const PoolView& view) {
        return py::buffer_info(
            reinterpret_cast<uint8_t*>(view.mapping->data() + view.offset),
            static_cast<py::ssize_t>(view.bytes), false);
      });
  py::class_<StagingPool>(module, "StagingPool")
      .def(py::init<uint64_t, int, bool>(), "capacity_bytes"_a, "threads"_a = 2,
           "pin"_a = false, Unlocked())
      .def_property_readonly("capacity", &StagingPool::capacity)
      .def_property_readonly("address", &StagingPool::address)
      .def_property_readonly("pinned", &StagingPool::pinned)
      .def("pin", &StagingPool::pin, Unlocked())
      .def("copy_in", &copy<&StagingPool::copy_in>, "copies"_a, Unlocked())
      .def("copy_out", &copy<&StagingPool::copy_out>, "copies"_a, Unlocked())
      .def(
          "view",
          [](const StagingPool& pool, uint64_t offset, uint64_t bytes) {
            PoolView view{pool.view(offset, bytes), offset, bytes};
            return py::memoryview(py::cast(std::move(view)));
          },
          "offset"_a, "nbytes"_a)
      .def("close", &StagingPool::close, Unlocked());
}

using Pieces = std::vector<std::tuple<uint64_t, uint64_t, uint64_t, bool>>;

std::unique_ptr<Stage> make_stage(const StagingPool& pool, std::string header,
                                  const Pieces& pieces, uint64_t file_bytes,
                                  uint64_t block_bytes, int threads) {
  std::vector<StagedPiece> staged;
  staged.reserve(pieces.size());
  for (const auto& [address, bytes, file_offset, lazy] : pieces) {
    staged.push_back({address, bytes, file_offset, lazy});
  }
  return std::make_unique<Stage>(pool, std::move(header), std::move(staged),
                                 file_bytes, block_bytes, threads);
}

std::vector<std::string> hex_hashes(const Stage& stage) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::vector<std::string> texts;
  for (const std::string& hash : stage.hashes()) {
    std::string text;
    for (const char byte : hash) {
      text += kDigits[static_cast<unsigned char>(byte) >> 4];
      text += kDigits[byte & 15];
    }
    texts.push_back(std::move(text));
  }
  return texts;
}

void bind_stage(py::module_& module) {
  py::class_<Stage>(module, "Stage")
      .def(py::init([](const StagingPool& pool, const py::bytes& header,
                       const Pieces& pieces, uint64_t file_bytes,
                       uint64_t block_bytes, int threads) {
             std::string text = header;
             const py::gil_scoped_release release;
             return make_stage(pool, std::move(text), pieces, file_bytes,
                               block_bytes, threads);
           }),
           "pool"_a, "header"_a, "pieces"_a, "file_bytes"_a, py::kw_only(),
           "block_bytes"_a = 4 << 20, "threads"_a = 2)
      .def_property_readonly("slabs", &Stage::slabs)
      .def_property_readonly("held_bytes", &Stage::held_bytes)
      .def_property_readonly("copied", &Stage::copied)
      .def("start", &Stage::start, Unlocked())
      .def("capture", &Stage::capture, Unlocked())
      .def("hurry", &Stage::hurry, "more"_a, Unlocked())
      .def("fence", &Stage::fence, "ranges"_a, Unlocked())
      .def("wait_copied", &Stage::wait_copied, Unlocked())
      .def("open", &Stage::open, "file_offset"_a, "nbytes"_a, Unlocked())
      .def("fill", &Stage::fill, "file_offset"_a, "nbytes"_a, Unlocked())
      .def("cancel", &Stage::cancel, "reason"_a, Unlocked())
      .def("hashes", &hex_hashes, Unlocked())
      .def("close", &Stage::close, Unlocked());
  module.def(
      "write_stage",
      [](Io& io, const Path& path, Stage& stage, int threads,
         uint64_t rate_limit, bool direct, int nice,
         const std::string& io_priority, bool over) {
        return write_blocks(io, path, stage, stage.file_bytes(),
                            {stage.block_bytes(), threads, rate_limit, direct,
                             priority_of(nice, io_priority), over});
      },
      "io"_a, "path"_a, "stage"_a, py::kw_only(), "threads"_a = 2,
      "rate_limit"_a = 0, "direct"_a = true, "nice"_a = 0,
      "io_priority"_a = "normal", "over"_a = false, Unlocked());
}

}  // namespace

Priority priority_of(int nice, const std::string& io_priority) {
  if (nice < 0 || nice > 19) {
    throw std::invalid_argument("nice is " + std::to_string(nice) +
                                ", must be 0 to 19");
  }
  if (io_priority == "normal") {
    return {nice, IoPriority::kNormal};
  }
  if (io_priority == "low") {
    return {nice, IoPriority::kLow};
  }
  if (io_priority == "idle") {
    return {nice, IoPriority::kIdle};
  }
  throw std::invalid_argument("io_priority is '" + io_priority +
                              "', must be normal, low or idle");
}

void bind_memory(py::module_& module) {
  bind_pool(module);
  bind_stage(module);
}

}  // namespace plait
