// The Python face of plait's C++ code: bindings only, no logic.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <filesystem>
#include <string_view>
#include <system_error>
#include <tuple>

#include "checksum.hpp"
#include "cuda_driver.hpp"
#include "errors.hpp"
#include "fault_io.hpp"
#include "file.hpp"
#include "io_facts.hpp"
#include "reader.hpp"
#include "staging_pool.hpp"
#include "writer.hpp"

namespace py = pybind11;

namespace {

using plait::Io;
using Path = std::filesystem::path;
using Unlocked = py::call_guard<py::gil_scoped_release>;
using Triples = std::vector<std::tuple<uint64_t, uint64_t, uint64_t>>;

constexpr const char* kDoc =
    R"(plait's snapshot engine in C++: checksums, staging memory, files.

    io = PosixIo()                                    # or FaultIo(script) in a test
    pool = StagingPool(1 << 30, threads=2)            # warm, huge-page aligned
    pool.copy_in([(tensor.data_ptr(), tensor.nbytes, 0)])
    done = write_file(io, path, header, [(pool.address, tensor.nbytes, 4096)], file_bytes)
    fsync_dir(io, folder)                             # the caller's duty, as is every rename
    read_ranges(io, path, file_bytes, done.crcs, [(4096, tensor.nbytes, tensor.data_ptr())])

Memory is passed as addresses, which must stay valid and unchanged until the call returns. Every call
that may take long runs without the GIL. Paths are str, bytes or os.PathLike. Errors: OSError with errno
and "operation 'path'"; ValueError for arguments; ChecksumError for a file that is not what was written.)";

// A borrowed contiguous buffer of any Python object that has one.
class ByteView {
 public:
  explicit ByteView(const py::buffer& source) {
    if (PyObject_GetBuffer(source.ptr(), &view_, PyBUF_SIMPLE) != 0) {
      throw py::error_already_set();
    }
  }
  ~ByteView() { PyBuffer_Release(&view_); }
  ByteView(const ByteView&) = delete;
  ByteView& operator=(const ByteView&) = delete;

  std::string_view text() const {
    return {static_cast<const char*>(view_.buf),
            static_cast<size_t>(view_.len)};
  }

 private:
  Py_buffer view_ = {};
};

// A part of a pool as a buffer; keeps the memory alive.
struct PoolView {
  std::shared_ptr<plait::HugeMapping> mapping;
  uint64_t offset;
  uint64_t bytes;
};

template <typename Item>
std::vector<Item> items(const Triples& triples) {
  std::vector<Item> result;
  result.reserve(triples.size());
  for (const auto& [a, b, c] : triples) {
    result.push_back(Item{a, b, c});
  }
  return result;
}

// Runs call(bytes) on a buffer's bytes without the GIL.
template <typename Call>
auto with_bytes(const py::buffer& source, Call call) {
  const ByteView view(source);
  const py::gil_scoped_release release;
  return call(view.text());
}

void bind_errors(py::module_& module) {
  static PyObject* checksum_error = nullptr;  // Lives as long as the process.
  checksum_error = PyErr_NewExceptionWithDoc(
      "plait._C.ChecksumError",
      "A file differs from what was written: .path, and .block (-1: its size).",
      PyExc_RuntimeError, nullptr);
  module.add_object("ChecksumError", py::handle(checksum_error));
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      std::rethrow_exception(thrown);
    } catch (const plait::ChecksumError& error) {
      py::object value = py::handle(checksum_error)(error.what());
      value.attr("path") = error.path();
      value.attr("block") = error.block();
      PyErr_SetObject(checksum_error, value.ptr());
    } catch (const std::system_error& error) {
      py::object value =
          py::handle(PyExc_OSError)(error.code().value(), error.what());
      PyErr_SetObject(py::type::handle_of(value).ptr(), value.ptr());
    }
  });
}

void bind_checksums(py::module_& module) {
  module.def("crc32c_has_hardware", &plait::crc32c_has_hardware);
  module.def(
      "crc32c",
      [](const py::buffer& data, uint32_t value, bool hardware) {
        const auto function = hardware ? plait::crc32c : plait::crc32c_table;
        return with_bytes(data, [&](std::string_view bytes) {
          return function(bytes.data(), bytes.size(), value);
        });
      },
      py::arg("data"), py::arg("value") = 0, py::arg("hardware") = true);
  module.def(
      "crc32c_blocks",
      [](const py::buffer& data, uint64_t block_bytes) {
        return with_bytes(data, [&](std::string_view bytes) {
          return plait::crc32c_blocks(bytes.data(), bytes.size(), block_bytes);
        });
      },
      py::arg("data"), py::arg("block_bytes"));
  module.def(
      "xxh3_128",
      [](const py::buffer& data) {
        const auto digest = with_bytes(data, [](std::string_view bytes) {
          return plait::xxh3_128(bytes.data(), bytes.size());
        });
        return py::bytes(reinterpret_cast<const char*>(digest.data()),
                         digest.size());
      },
      py::arg("data"));
}

void bind_io(py::module_& module) {
  py::class_<Io>(module, "Io");
  py::class_<plait::PosixIo, Io>(module, "PosixIo").def(py::init<>());
  py::class_<plait::FaultIo, Io>(module, "FaultIo")
      .def(py::init<const std::vector<plait::FaultIo::Step>&, bool,
                    std::vector<std::string>>(),
           py::arg("script") = std::vector<plait::FaultIo::Step>(),
           py::arg("sticky") = false,
           py::arg("only") = std::vector<std::string>())
      .def_property_readonly("ops", &plait::FaultIo::ops);
}

void bind_pool(py::module_& module) {
  using plait::StagingPool;
  py::class_<PoolView>(module, "PoolView", py::buffer_protocol())
      .def_buffer([](const PoolView& view) {
        return py::buffer_info(
            reinterpret_cast<uint8_t*>(view.mapping->data() + view.offset),
            static_cast<py::ssize_t>(view.bytes), false);
      });
  py::class_<StagingPool>(module, "StagingPool")
      .def(py::init<uint64_t, int, bool>(), py::arg("capacity_bytes"),
           py::arg("threads") = 2, py::arg("pin") = false, Unlocked())
      .def_property_readonly("capacity", &StagingPool::capacity)
      .def_property_readonly("address", &StagingPool::address)
      .def_property_readonly("pinned", &StagingPool::pinned)
      .def(
          "copy_in",
          [](const StagingPool& pool, const Triples& copies) {
            pool.copy_in(items<plait::Copy>(copies));
          },
          py::arg("copies"), Unlocked())
      .def(
          "copy_out",
          [](const StagingPool& pool, const Triples& copies) {
            pool.copy_out(items<plait::Copy>(copies));
          },
          py::arg("copies"), Unlocked())
      .def(
          "view",
          [](const StagingPool& pool, uint64_t offset, uint64_t bytes) {
            const py::object view =
                py::cast(PoolView{pool.view(offset, bytes), offset, bytes});
            return py::memoryview(view);
          },
          py::arg("offset"), py::arg("nbytes"))
      .def("close", &StagingPool::close, Unlocked());
}

void bind_data_files(py::module_& module) {
  py::class_<plait::WriteResult>(module, "WriteResult")
      .def_readonly("crcs", &plait::WriteResult::crcs)
      .def_readonly("direct", &plait::WriteResult::direct)
      .def_readonly("fallback_reason", &plait::WriteResult::fallback_reason);
  module.def(
      "write_file",
      [](Io& io, const Path& path, const py::buffer& header,
         const Triples& pieces, uint64_t file_bytes, uint64_t block_bytes,
         int threads, uint64_t rate_limit, bool direct, bool background) {
        return with_bytes(header, [&](std::string_view bytes) {
          return plait::write_file(
              io, path.string(), bytes, items<plait::Piece>(pieces), file_bytes,
              {block_bytes, threads, rate_limit, direct, background});
        });
      },
      py::arg("io"), py::arg("path"), py::arg("header"), py::arg("pieces"),
      py::arg("file_bytes"), py::kw_only(), py::arg("block_bytes") = 4 << 20,
      py::arg("threads") = 2, py::arg("rate_limit") = 0,
      py::arg("direct") = true, py::arg("background") = false);
  module.def(
      "read_ranges",
      [](Io& io, const Path& path, uint64_t file_bytes,
         const std::vector<uint32_t>& crcs, const Triples& requests,
         uint64_t block_bytes, int threads, bool direct) {
        return plait::read_ranges(io, path.string(), file_bytes, crcs,
                                  items<plait::ReadRequest>(requests),
                                  {block_bytes, threads, direct});
      },
      py::arg("io"), py::arg("path"), py::arg("file_bytes"), py::arg("crcs"),
      py::arg("requests"), py::kw_only(), py::arg("block_bytes") = 4 << 20,
      py::arg("threads") = 2, py::arg("direct") = true, Unlocked());
}

// One call of Io on one path, repeated while interrupted.
void bind_path_call(py::module_& module, const char* name,
                    int64_t (Io::*call)(const std::string&)) {
  module.def(
      name,
      [name, call](Io& io, const Path& path) {
        const std::string text = path.string();
        plait::check(name, text, [&] { return (io.*call)(text); });
      },
      py::arg("io"), py::arg("path"), Unlocked());
}

void bind_small_files(py::module_& module) {
  module.def(
      "write_small",
      [](Io& io, const Path& path, const py::buffer& data, bool exclusive) {
        with_bytes(data, [&](std::string_view bytes) {
          plait::write_small(io, path.string(), bytes, exclusive);
        });
      },
      py::arg("io"), py::arg("path"), py::arg("data"),
      py::arg("exclusive") = true);
  module.def(
      "read_small",
      [](Io& io, const Path& path, uint64_t max_bytes) {
        const auto read = [&] {
          const py::gil_scoped_release release;
          return plait::read_small(io, path.string(), max_bytes);
        };
        return py::bytes(read());
      },
      py::arg("io"), py::arg("path"), py::arg("max_bytes"));
  module.def(
      "rename",
      [](Io& io, const Path& from, const Path& to) {
        const std::string both = from.string() + "' -> '" + to.string();
        plait::check("rename", both,
                     [&] { return io.rename(from.string(), to.string()); });
      },
      py::arg("io"), py::arg("source"), py::arg("target"), Unlocked());
  module.def(
      "free_bytes",
      [](Io& io, const Path& path) {
        return plait::check("statvfs", path.string(),
                            [&] { return io.free_bytes(path.string()); });
      },
      py::arg("io"), py::arg("path"), Unlocked());
  bind_path_call(module, "fsync_dir", &Io::fsync_dir);
  bind_path_call(module, "unlink", &Io::unlink);
  bind_path_call(module, "mkdir", &Io::mkdir);
  bind_path_call(module, "rmdir", &Io::rmdir);
}

py::dict probe_driver(bool initialize) {
  const plait::CudaDriver driver;
  std::string reason = driver.reason();
  try {
    if (initialize && driver.available()) {
      driver.initialize();
    }
  } catch (const std::runtime_error& error) {
    reason = error.what();
  }
  const int version = driver.available() ? driver.version() : 0;
  return py::dict(py::arg("available") = reason.empty(),
                  py::arg("reason") = reason,
                  py::arg("host_register") = driver.available(),
                  py::arg("driver_version") = version);
}

py::dict facts_dict(const Path& path) {
  const plait::IoFacts facts = plait::io_facts(path.string());
  return py::dict(py::arg("direct_io") = facts.direct_io,
                  py::arg("direct_io_reason") = facts.direct_io_reason,
                  py::arg("io_uring") = facts.io_uring,
                  py::arg("io_uring_reason") = facts.io_uring_reason,
                  py::arg("filesystem") = facts.filesystem,
                  py::arg("free_bytes") = facts.free_bytes,
                  py::arg("total_bytes") = facts.total_bytes);
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = kDoc;
  bind_errors(module);
  bind_checksums(module);
  bind_io(module);
  bind_pool(module);
  bind_data_files(module);
  bind_small_files(module);
  py::class_<plait::CudaDriver>(module, "CudaDriver")
      .def_static("probe", &probe_driver, py::arg("initialize") = false);
  module.def("io_facts", &facts_dict, py::arg("path"));
}
