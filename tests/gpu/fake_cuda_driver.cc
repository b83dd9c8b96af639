// SPDX-License-Identifier: Apache-2.0
//
// A library that stands in for CUDA's driver where memory is shared: one allocation at a time,
// which lies nowhere. The function that the variable ATTND_TEST_CUDA names refuses, with
// ATTND_TEST_CUDA_CODE or 801; what is held is counted, and must be given back in the order that
// CUDA asks for.
#include <cuda.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

namespace {

constexpr CUdeviceptr kAddress = CUdeviceptr{2} << 20;
constexpr CUmemGenericAllocationHandle kMemory = 77;
int held = 0;
bool mapped = false;

// What a function answers that takes something (1), gives it back (-1), or neither.
CUresult Answer(const char* name, bool right, int takes) {
  const char* const refused = std::getenv("ATTND_TEST_CUDA");
  if (!right) return CUDA_ERROR_INVALID_VALUE;
  if (refused != nullptr && std::strcmp(refused, name) == 0) {
    const char* const code = std::getenv("ATTND_TEST_CUDA_CODE");
    return code != nullptr ? static_cast<CUresult>(std::atoi(code)) : CUDA_ERROR_NOT_SUPPORTED;
  }
  held += takes;
  return CUDA_SUCCESS;
}

}  // namespace

extern "C" {
int attnd_test_cuda_held() { return held; }

CUresult cuMemCreate(CUmemGenericAllocationHandle* memory, size_t bytes,
                     const CUmemAllocationProp* kind, unsigned long long) {
  *memory = kMemory;
  const bool right = bytes % kAddress == 0 && kind->type == CU_MEM_ALLOCATION_TYPE_PINNED &&
                     kind->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR &&
                     kind->location.type == CU_MEM_LOCATION_TYPE_DEVICE && kind->location.id == 3;
  return Answer("cuMemCreate", right, 1);
}
CUresult cuMemExportToShareableHandle(void* handle, CUmemGenericAllocationHandle memory,
                                      CUmemAllocationHandleType, unsigned long long) {
  const CUresult answer = Answer("cuMemExportToShareableHandle", memory == kMemory, 0);
  if (answer == CUDA_SUCCESS) *static_cast<int*>(handle) = dup(0);
  return answer;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle memory) {
  return Answer("cuMemRelease", memory == kMemory, -1);
}
CUresult cuMemAddressReserve(CUdeviceptr* at, size_t, size_t, CUdeviceptr, unsigned long long) {
  *at = kAddress;
  return Answer("cuMemAddressReserve", true, 1);
}
CUresult cuMemAddressFree(CUdeviceptr at, size_t bytes) {
  return Answer("cuMemAddressFree", at == kAddress && bytes == kAddress && !mapped, -1);
}
CUresult cuMemMap(CUdeviceptr at, size_t, size_t, CUmemGenericAllocationHandle memory,
                  unsigned long long) {
  const CUresult answer = Answer("cuMemMap", at == kAddress && memory == kMemory, 1);
  mapped |= answer == CUDA_SUCCESS;
  return answer;
}
CUresult cuMemUnmap(CUdeviceptr at, size_t bytes) {
  const CUresult answer = Answer("cuMemUnmap", at == kAddress && bytes == kAddress && mapped, -1);
  if (answer == CUDA_SUCCESS) mapped = false;
  return answer;
}
CUresult cuMemSetAccess(CUdeviceptr at, size_t, const CUmemAccessDesc* access, size_t count) {
  const bool right = at == kAddress && count == 1 && access->location.id == 3 &&
                     access->location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
                     access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return Answer("cuMemSetAccess", right, 0);
}
}
