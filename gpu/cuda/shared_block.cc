// SPDX-License-Identifier: Apache-2.0
#include "gpu/cuda/shared_block.h"

#include <cuda.h>
#include <dlfcn.h>

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "gpu/cuda/cuda_status.h"

namespace attnd::gpu {
namespace {

absl::Status Check(CUresult code, const char* call, uint64_t bytes) {
  if (code == CUDA_SUCCESS) return absl::OkStatus();
  const std::string message =
      absl::StrCat("CUDA refuses ", bytes, " bytes of GPU memory to share: ", call, ", error ",
                   static_cast<int>(code));
  if (code == CUDA_ERROR_OUT_OF_MEMORY) return absl::ResourceExhaustedError(message);
  // The driver's numbers are the runtime's.
  if (IsDeviceFault(static_cast<cudaError_t>(code))) return absl::InternalError(message);
  return absl::UnimplementedError(message);
}

}  // namespace

struct SharedBlock::Driver {
  Driver() = default;
  ~Driver() {
    if (handle != nullptr) dlclose(handle);
  }
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  absl::Status Open(const std::string& library) {
    handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) return absl::UnimplementedError(dlerror());
    ATTND_RETURN_IF_ERROR(Find("cuMemCreate", &create));
    ATTND_RETURN_IF_ERROR(Find("cuMemExportToShareableHandle", &export_handle));
    ATTND_RETURN_IF_ERROR(Find("cuMemRelease", &release));
    ATTND_RETURN_IF_ERROR(Find("cuMemAddressReserve", &reserve));
    ATTND_RETURN_IF_ERROR(Find("cuMemAddressFree", &free));
    ATTND_RETURN_IF_ERROR(Find("cuMemMap", &map));
    ATTND_RETURN_IF_ERROR(Find("cuMemUnmap", &unmap));
    return Find("cuMemSetAccess", &set_access);
  }
  template <typename Function>
  absl::Status Find(const char* name, Function** function) {
    *function = reinterpret_cast<Function*>(dlsym(handle, name));
    if (*function != nullptr) return absl::OkStatus();
    return absl::UnimplementedError(absl::StrCat("CUDA's driver has no ", name));
  }

  // A descriptor of the memory, and addresses at which kernels have it. It is kept by either.
  absl::StatusOr<CUdeviceptr> ShareAndMap(const CUmemAllocationProp& kind,
                                          CUmemGenericAllocationHandle memory, uint64_t bytes,
                                          OwnedFd* descriptor) const {
    constexpr auto kDescriptor = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    int fd = -1;
    ATTND_RETURN_IF_ERROR(
        Check(export_handle(&fd, memory, kDescriptor, 0), "cuMemExportToShareableHandle", bytes));
    *descriptor = OwnedFd(fd);
    CUdeviceptr at = 0;
    ATTND_RETURN_IF_ERROR(Check(reserve(&at, bytes, 0, 0, 0), "cuMemAddressReserve", bytes));
    absl::Status status = Check(map(at, bytes, 0, memory, 0), "cuMemMap", bytes);
    if (status.ok()) {
      CUmemAccessDesc access = {};
      access.location = kind.location;
      access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
      status = Check(set_access(at, bytes, &access, 1), "cuMemSetAccess", bytes);
      if (status.ok()) return at;
      static_cast<void>(unmap(at, bytes));
    }
    static_cast<void>(free(at, bytes));
    return status;
  }

  void* handle = nullptr;
  decltype(cuMemCreate)* create = nullptr;
  decltype(cuMemExportToShareableHandle)* export_handle = nullptr;
  decltype(cuMemRelease)* release = nullptr;
  decltype(cuMemAddressReserve)* reserve = nullptr;
  decltype(cuMemAddressFree)* free = nullptr;
  decltype(cuMemMap)* map = nullptr;
  decltype(cuMemUnmap)* unmap = nullptr;
  decltype(cuMemSetAccess)* set_access = nullptr;
};

absl::StatusOr<std::unique_ptr<SharedBlock>> SharedBlock::Create(const std::string& library,
                                                                 int device, uint64_t bytes,
                                                                 OwnedFd* descriptor) {
  auto driver = std::make_unique<Driver>();
  ATTND_RETURN_IF_ERROR(driver->Open(library));
  CUmemAllocationProp kind = {};
  kind.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  kind.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  kind.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  kind.location.id = device;
  CUmemGenericAllocationHandle memory = 0;
  ATTND_RETURN_IF_ERROR(Check(driver->create(&memory, bytes, &kind, 0), "cuMemCreate", bytes));
  OwnedFd exported;
  const auto at = driver->ShareAndMap(kind, memory, bytes, &exported);
  static_cast<void>(driver->release(memory));
  if (!at.ok()) return at.status();
  *descriptor = std::move(exported);
  // NOLINTNEXTLINE(performance-no-int-to-ptr): the driver has the device's addresses as numbers
  auto* const data = reinterpret_cast<std::byte*>(*at);
  return std::unique_ptr<SharedBlock>(new SharedBlock(std::move(driver), data, bytes));
}

SharedBlock::SharedBlock(std::unique_ptr<const Driver> driver, std::byte* data, uint64_t bytes)
    : driver_(std::move(driver)), data_(data), bytes_(bytes) {}

SharedBlock::~SharedBlock() {
  const auto at = reinterpret_cast<CUdeviceptr>(data_);
  static_cast<void>(driver_->unmap(at, bytes_));
  static_cast<void>(driver_->free(at, bytes_));
}

}  // namespace attnd::gpu
