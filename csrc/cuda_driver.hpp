// The few CUDA driver calls that pin host memory, opened at run time. Neither
// headers nor a toolkit are needed; "no driver" is an answer, not an error.
#ifndef PLAIT_CSRC_CUDA_DRIVER_HPP_
#define PLAIT_CSRC_CUDA_DRIVER_HPP_

#include <cstddef>
#include <string>

#include "facts.hpp"

namespace plait {

// Owns the handle of libcuda.so.1 (which, once loaded, stays loaded). The
// constructor cannot fail; the calls throw std::runtime_error naming the CUDA
// call and the driver's own text. Thread-safe: nothing changes after it.
class CudaDriver {
 public:
  CudaDriver();
  ~CudaDriver();
  CudaDriver(const CudaDriver&) = delete;
  CudaDriver& operator=(const CudaDriver&) = delete;

  bool available() const { return reason_.empty(); }
  // Why the driver cannot be used, or empty.
  const std::string& reason() const { return reason_; }
  // available, reason, host_register (the symbols are there), driver_version
  // (as version(), 0 without a driver); `initialize` asks cuInit too.
  static Facts probe(bool initialize);
  // E.g. 12080 for CUDA 12.8; needs no initialisation.
  int version() const;
  // cuInit. Never call it in a process that forks workers later: a child
  // cannot use CUDA then.
  void initialize() const;
  // Page-locks memory for all contexts. The calling thread needs a current
  // context, as torch makes at its first CUDA tensor; returns it.
  void* host_register(void* address, size_t bytes) const;
  // In that context, from any thread: it need not have one of its own.
  void host_unregister(void* address, void* context) const;
  // From here on, what the calling thread asks of the driver (to wait for an
  // event) neither ends the graph capture of another thread nor fails for one.
  // Needs a current context; false where the driver has no such thing.
  static bool relax_captures();

 private:
  void throw_if(int result, const char* call) const;

  void* library_ = nullptr;
  std::string reason_;
  int (*init_)(unsigned) = nullptr;
  int (*version_)(int*) = nullptr;
  int (*error_string_)(int, const char**) = nullptr;
  int (*current_context_)(void**) = nullptr;
  int (*push_context_)(void*) = nullptr;
  int (*pop_context_)(void**) = nullptr;
  int (*host_register_)(void*, size_t, unsigned) = nullptr;
  int (*host_unregister_)(void*) = nullptr;
  int (*exchange_capture_mode_)(int*) = nullptr;  // May be missing.
};

}  // namespace plait

#endif  // PLAIT_CSRC_CUDA_DRIVER_HPP_
