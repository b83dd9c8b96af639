// SPDX-License-Identifier: Apache-2.0
//
// NVRTC as attnd.cuda calls it, for a version that no machine has: compiles nothing, and returns
// the codes that a test writes here.
#include <cstddef>
#include <cstring>

extern "C" {

int compile_code = 0;
int size_code = 0;
int cubin_code = 0;

int nvrtcCreateProgram(void** program, const char*, const char*, int, const char* const*,
                       const char* const*) {
  *program = &compile_code;
  return 0;
}
int nvrtcDestroyProgram(void** program) {
  *program = nullptr;
  return 0;
}
int nvrtcCompileProgram(void*, int, const char* const*) { return compile_code; }
int nvrtcGetProgramLogSize(void*, size_t* bytes) {
  *bytes = 4;
  return 0;
}
int nvrtcGetProgramLog(void*, char* log) {
  std::memcpy(log, "log", 4);
  return 0;
}
int nvrtcGetCUBINSize(void*, size_t* bytes) {
  *bytes = 5;
  return size_code;
}
int nvrtcGetCUBIN(void*, char* cubin) {
  if (cubin_code == 0) std::memcpy(cubin, "cubin", 5);
  return cubin_code;
}
const char* nvrtcGetErrorString(int) { return "planted"; }

}  // extern "C"
