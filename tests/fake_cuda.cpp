// A CUDA driver that pins nothing and writes down what it is asked, one line a
// call, to the file in its folder called calls. Built by tests as libcuda.so.1.
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {
thread_local void* context = nullptr;
char first_context;

int say(const char* call, int result) {
  const char* path = std::getenv("FAKE_CUDA_CALLS");
  std::FILE* file = std::fopen(path != nullptr ? path : "/dev/null", "a");
  std::fprintf(file, "%s %d\n", call, result);
  std::fclose(file);
  return result;
}

bool refuses() { return std::getenv("FAKE_CUDA_REFUSES") != nullptr; }
}  // namespace

extern "C" {
int cuInit(unsigned) { return say("cuInit", 0); }
int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
int cuGetErrorString(int error, const char** text) {
  *text = error == 201 ? "invalid device context" : "out of memory";
  return 0;
}
int cuCtxGetCurrent(void** current) {
  *current = context;
  return 0;
}
int cuCtxPushCurrent_v2(void* pushed) {
  context = pushed;
  return say("push", pushed == &first_context ? 0 : 201);
}
int cuCtxPopCurrent_v2(void** popped) {
  *popped = context;
  context = nullptr;
  return say("pop", 0);
}
// What torch does at its first CUDA tensor.
void fake_first_tensor() { context = &first_context; }
int cuMemHostRegister_v2(void*, size_t, unsigned flags) {
  const int result = context == nullptr ? 201 : refuses() ? 2 : flags != 1;
  return say("register", result);
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  return say(*mode == 2 ? "relax" : "mode", context == nullptr ? 201 : 0);
}
int cuMemHostUnregister(void*) {
  return say("unregister", context == nullptr ? 201 : 0);
}
}
