// The Python face of plait's C++ code: bindings only, no logic.
#include <string_view>
#include <system_error>

#include "bindings.hpp"
#include "checksum.hpp"
#include "crc32c_fold.hpp"
#include "cuda_driver.hpp"
#include "errors.hpp"
#include "fault_io.hpp"
#include "file.hpp"
#include "io_facts.hpp"
#include "module_doc.hpp"
#include "reader.hpp"
#include "stream_copy.hpp"

namespace py = pybind11;

namespace {

using py::literals::operator""_a;
using plait::FaultIo;
using plait::Io;
using plait::items;
using plait::Path;
using plait::Triples;
using plait::Unlocked;

template <typename Call>
auto unlocked(Call call) {
  const py::gil_scoped_release release;
  return call();
}

// Runs call(data, bytes, arguments...) without the GIL on what any bytes-like
// object holds.
template <typename Call, typename... Arguments>
auto with_bytes(const py::buffer& source, Call call, Arguments... arguments) {
  const py::buffer_info info = source.request();
  if (PyBuffer_IsContiguous(info.view(), 'C') == 0) {
    throw std::invalid_argument("the buffer must be contiguous");
  }
  const auto bytes = static_cast<size_t>(info.view()->len);
  return unlocked([&] { return call(info.ptr, bytes, arguments...); });
}

// Paths, and so messages, need not be UTF-8.
py::object text(const char* bytes) {
  return py::reinterpret_steal<py::object>(PyUnicode_DecodeFSDefault(bytes));
}

void bind_errors(py::module_& module) {
  static PyObject* checksum_error = nullptr;  // Lives as long as the process.
  checksum_error =
      PyErr_NewException("plait._C.ChecksumError", PyExc_RuntimeError, nullptr);
  module.add_object("ChecksumError", checksum_error);
  static PyObject* torn_error = nullptr;
  torn_error =
      PyErr_NewException("plait._C.TornError", PyExc_RuntimeError, nullptr);
  module.add_object("TornError", torn_error);
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      std::rethrow_exception(thrown);
    } catch (const plait::ChecksumError& error) {
      py::object value = py::handle(checksum_error)(text(error.what()));
      value.attr("path") = text(error.path().c_str());
      value.attr("block") = error.block();
      PyErr_SetObject(checksum_error, value.ptr());
    } catch (const plait::TornError& error) {
      py::object value = py::handle(torn_error)(text(error.what()));
      value.attr("piece") = error.piece();
      PyErr_SetObject(torn_error, value.ptr());
    } catch (const std::system_error& error) {
      const py::handle os_error = PyExc_OSError;  // It finds the subclass.
      py::object value = os_error(error.code().value(), text(error.what()));
      PyErr_SetObject(os_error.ptr(), value.ptr());
    }
  });
}

void bind_bytes(py::module_& module) {
  module.def("crc32c_fold_width", &plait::crc32c_fold_width);
  module.def(
      "crc32c",
      [](const py::buffer& data, uint32_t value, int width) {
        return with_bytes(data, plait::crc32c, value, width);
      },
      "data"_a, "value"_a = 0, "width"_a = plait::kWidest);
  module.def(
      "crc32c_blocks",
      [](const py::buffer& data, uint64_t block_bytes) {
        return with_bytes(data, plait::crc32c_blocks, block_bytes);
      },
      "data"_a, "block_bytes"_a);
  module.def(
      "xxh3_128",
      [](const py::buffer& data) {
        return py::bytes(with_bytes(data, plait::xxh3_128));
      },
      "data"_a);
  module.def(
      "stream_copy",
      [](uint64_t address, const py::buffer& source, int width) {
        with_bytes(source, [&](const void* data, size_t bytes) {
          plait::stream_copy(reinterpret_cast<void*>(address), data, bytes,
                             width);
        });
      },
      "address"_a, "source"_a, "width"_a = plait::kWidest);
}

void bind_io(py::module_& module) {
  py::class_<Io>(module, "Io");
  py::class_<plait::PosixIo, Io>(module, "PosixIo").def(py::init<>());
  py::class_<FaultIo, Io>(module, "FaultIo")
      .def(py::init<const FaultIo::Script&, bool, FaultIo::Names>(),
           "script"_a = FaultIo::Script(), "sticky"_a = false,
           "only"_a = FaultIo::Names())
      .def_property_readonly("ops", &FaultIo::ops);
}

void bind_data_files(py::module_& module) {
  py::class_<plait::WriteResult>(module, "WriteResult")
      .def_readonly("crcs", &plait::WriteResult::crcs)
      .def_readonly("direct", &plait::WriteResult::direct)
      .def_readonly("fallback_reason", &plait::WriteResult::fallback_reason)
      .def_readonly("reused", &plait::WriteResult::reused);
  module.def(
      "write_file",
      [](Io& io, const Path& path, std::string_view header,
         const Triples& pieces, uint64_t file_bytes, uint64_t block_bytes,
         int threads, uint64_t rate_limit, bool direct, int nice,
         const std::string& io_priority, bool over) {
        return plait::write_file(
            io, path, header, items<plait::Piece>(pieces), file_bytes,
            {block_bytes, threads, rate_limit, direct,
             plait::priority_of(nice, io_priority), over});
      },
      "io"_a, "path"_a, "header"_a, "pieces"_a, "file_bytes"_a, py::kw_only(),
      "block_bytes"_a = 4 << 20, "threads"_a = 2, "rate_limit"_a = 0,
      "direct"_a = true, "nice"_a = 0, "io_priority"_a = "normal",
      "over"_a = false, Unlocked());
  module.def(
      "read_ranges",
      [](Io& io, const Path& path, uint64_t file_bytes,
         const std::vector<uint32_t>& crcs, const Triples& requests,
         uint64_t block_bytes, int threads, bool direct) {
        return plait::read_ranges(io, path, file_bytes, crcs,
                                  items<plait::ReadRequest>(requests),
                                  {block_bytes, threads, direct});
      },
      "io"_a, "path"_a, "file_bytes"_a, "crcs"_a, "requests"_a, py::kw_only(),
      "block_bytes"_a = 4 << 20, "threads"_a = 4, "direct"_a = true,
      Unlocked());
}

// One call of Io on one path, repeated while interrupted.
void bind_path_call(py::module_& module, const char* name,
                    int64_t (Io::*call)(const std::string&)) {
  module.def(
      name,
      [name, call](Io& io, const Path& path) {
        plait::check(name, path, [&] { return (io.*call)(path); });
      },
      "io"_a, "path"_a, Unlocked());
}

void bind_small_files(py::module_& module) {
  module.def(
      "write_small",
      [](Io& io, const Path& path, std::string_view data, bool exclusive) {
        plait::write_small(io, path, data, exclusive);
      },
      "io"_a, "path"_a, "data"_a, "exclusive"_a = true, Unlocked());
  module.def(
      "read_small",
      [](Io& io, const Path& path, uint64_t max_bytes) {
        return py::bytes(
            unlocked([&] { return plait::read_small(io, path, max_bytes); }));
      },
      "io"_a, "path"_a, "max_bytes"_a);
  module.def(
      "rename",
      [](Io& io, const Path& from, const Path& to) {
        plait::check("rename", from.string() + "' -> '" + to.string(),
                     [&] { return io.rename(from, to); });
      },
      "io"_a, "source"_a, "target"_a, Unlocked());
  module.def(
      "free_bytes",
      [](Io& io, const Path& path) {
        const auto call = [&] { return io.free_bytes(path); };
        return plait::check("statvfs", path, call);
      },
      "io"_a, "path"_a, Unlocked());
  bind_path_call(module, "fsync_dir", &Io::fsync_dir);
  bind_path_call(module, "unlink", &Io::unlink);
  bind_path_call(module, "mkdir", &Io::mkdir);
  bind_path_call(module, "rmdir", &Io::rmdir);
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = plait::kModuleDoc;
  bind_errors(module);
  bind_bytes(module);
  bind_io(module);
  plait::bind_memory(module);
  bind_data_files(module);
  bind_small_files(module);
  const auto facts = [](const Path& path) { return plait::io_facts(path); };
  module.def("io_facts", facts, "path"_a, Unlocked());
  py::class_<plait::CudaDriver>(module, "CudaDriver")
      .def_static("probe", &plait::CudaDriver::probe, "initialize"_a = false)
      .def_static("relax_captures", &plait::CudaDriver::relax_captures);
}
