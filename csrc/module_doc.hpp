// What help(plait._C) says. A file of its own only for its length.
#ifndef PLAIT_CSRC_MODULE_DOC_HPP_
#define PLAIT_CSRC_MODULE_DOC_HPP_

namespace plait {

inline constexpr const char* kModuleDoc =
    R"(plait's snapshot engine in C++: checksums, staging memory, files.

    io = PosixIo()                                    # or FaultIo(script) in a test
    pool = StagingPool(1 << 30, threads=2)            # warm, huge-page aligned
    pool.copy_in([(tensor.data_ptr(), tensor.nbytes, 0)])
    done = write_file(io, path, header, [(pool.address, tensor.nbytes, 4096)], file_bytes)
    fsync_dir(io, folder)                             # the caller's duty, as is every rename
    read_ranges(io, path, file_bytes, done.crcs, [(4096, tensor.nbytes, tensor.data_ptr())])

Memory is passed as addresses, which must stay valid and unchanged until the call returns. Every call
that may take long runs without the GIL. Paths are str, bytes or os.PathLike. Errors: OSError with errno
and "operation 'path'"; ValueError for arguments; ChecksumError (.path, .block, -1 for the size) for a
file that is not what was written.)";

}  // namespace plait

#endif  // PLAIT_CSRC_MODULE_DOC_HPP_
