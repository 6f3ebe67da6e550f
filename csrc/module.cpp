// The Python face of plait's C++ code: bindings only, no logic.
#include <pybind11/pybind11.h>

PYBIND11_MODULE(_C, module) { module.doc() = "plait's snapshot engine in C++"; }
