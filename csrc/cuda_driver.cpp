#include "cuda_driver.hpp"

#include <dlfcn.h>

#include <stdexcept>

namespace plait {
namespace {

template <typename Function>
bool load(void* library, const char* symbol, Function*& function) {
  function = reinterpret_cast<Function*>(::dlsym(library, symbol));
  return function != nullptr;
}

}  // namespace

CudaDriver::CudaDriver() {
  // NODELETE: the driver starts threads and must not be unmapped under them.
  library_ = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (library_ == nullptr) {
    const char* text = ::dlerror();
    reason_ = text != nullptr ? text : "libcuda.so.1 cannot be opened";
    return;
  }
  const bool complete =
      load(library_, "cuInit", init_) &&
      load(library_, "cuDriverGetVersion", version_) &&
      load(library_, "cuGetErrorString", error_string_) &&
      load(library_, "cuCtxGetCurrent", current_context_) &&
      load(library_, "cuCtxPushCurrent_v2", push_context_) &&
      load(library_, "cuCtxPopCurrent_v2", pop_context_) &&
      load(library_, "cuMemHostRegister_v2", host_register_) &&
      load(library_, "cuMemHostUnregister", host_unregister_);
  load(library_, "cuThreadExchangeStreamCaptureMode", exchange_capture_mode_);
  if (!complete) {
    reason_ = "libcuda.so.1 lacks cuMemHostRegister_v2 or another call";
  }
}

CudaDriver::~CudaDriver() {
  if (library_ != nullptr) {
    ::dlclose(library_);
  }
}

void CudaDriver::throw_if(int result, const char* call) const {
  if (result == 0) {
    return;
  }
  const char* text = nullptr;
  error_string_(result, &text);
  throw std::runtime_error(std::string(call) + ": " +
                           (text != nullptr ? text : "unknown error") + " (" +
                           std::to_string(result) + ")");
}

Facts CudaDriver::probe(bool initialize) {
  const CudaDriver driver;
  std::string reason = driver.reason();
  uint64_t version = 0;
  try {
    if (driver.available()) {
      version = static_cast<uint64_t>(driver.version());
    }
    if (driver.available() && initialize) {
      driver.initialize();
    }
  } catch (const std::runtime_error& error) {
    reason = error.what();
  }
  return {{"available", reason.empty()},
          {"reason", reason},
          {"host_register", driver.available()},
          {"driver_version", version}};
}

int CudaDriver::version() const {
  int version = 0;
  throw_if(version_(&version), "cuDriverGetVersion");
  return version;
}

void CudaDriver::initialize() const { throw_if(init_(0), "cuInit"); }

void* CudaDriver::host_register(void* address, size_t bytes) const {
  constexpr unsigned kPortable = 1;  // CU_MEMHOSTREGISTER_PORTABLE
  void* context = nullptr;
  throw_if(current_context_(&context), "cuCtxGetCurrent");
  if (context == nullptr) {
    throw std::runtime_error(
        "cuMemHostRegister: the calling thread has no CUDA context");
  }
  throw_if(host_register_(address, bytes, kPortable), "cuMemHostRegister");
  return context;
}

void CudaDriver::host_unregister(void* address, void* context) const {
  throw_if(push_context_(context), "cuCtxPushCurrent");
  const int result = host_unregister_(address);
  void* popped = nullptr;
  pop_context_(&popped);
  throw_if(result, "cuMemHostUnregister");
}

bool CudaDriver::relax_captures() {
  const CudaDriver driver;
  int mode = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED
  return driver.exchange_capture_mode_ != nullptr &&
         driver.exchange_capture_mode_(&mode) == 0;
}

}  // namespace plait
