// SPDX-License-Identifier: Apache-2.0
#include "gpu/cuda/shared_block.h"

#include <cuda.h>
#include <dlfcn.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace attnd::gpu {
namespace {

// The driver's functions, from the library that the CUDA runtime has loaded.
class Driver {
 public:
  static absl::StatusOr<const Driver*> Load() {
    static const auto* const loaded = new absl::StatusOr<Driver>(Find());  // as long as the process
    if (!loaded->ok()) return loaded->status();
    return &**loaded;
  }

  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemExportToShareableHandle) export_handle = nullptr;
  decltype(&cuMemAddressReserve) reserve = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemAddressFree) free_address = nullptr;
  decltype(&cuMemRelease) release = nullptr;

 private:
  static absl::StatusOr<Driver> Find() {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return absl::ResourceExhaustedError(dlerror());
    Driver driver;
    const auto find = [library](const char* name, auto* function) -> absl::Status {
      *function = reinterpret_cast<std::decay_t<decltype(*function)>>(dlsym(library, name));
      if (*function != nullptr) return absl::OkStatus();
      return absl::ResourceExhaustedError(absl::StrCat("CUDA's driver has no ", name));
    };
    ATTND_RETURN_IF_ERROR(find("cuMemCreate", &driver.create));
    ATTND_RETURN_IF_ERROR(find("cuMemExportToShareableHandle", &driver.export_handle));
    ATTND_RETURN_IF_ERROR(find("cuMemAddressReserve", &driver.reserve));
    ATTND_RETURN_IF_ERROR(find("cuMemMap", &driver.map));
    ATTND_RETURN_IF_ERROR(find("cuMemSetAccess", &driver.set_access));
    ATTND_RETURN_IF_ERROR(find("cuMemUnmap", &driver.unmap));
    ATTND_RETURN_IF_ERROR(find("cuMemAddressFree", &driver.free_address));
    ATTND_RETURN_IF_ERROR(find("cuMemRelease", &driver.release));
    return driver;
  }
};

absl::Status Check(CUresult code, const char* call, uint64_t bytes) {
  if (code == CUDA_SUCCESS) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("CUDA refuses ", bytes,
                                                   " bytes of GPU memory to share: ", call,
                                                   ", error ", static_cast<int>(code)));
}

// Addresses with the memory behind them, which they keep: its handle is not needed any more.
absl::StatusOr<CUdeviceptr> MapMemory(const Driver& driver, const CUmemAllocationProp& kind,
                                      CUmemGenericAllocationHandle memory, uint64_t bytes) {
  CUdeviceptr address = 0;
  ATTND_RETURN_IF_ERROR(
      Check(driver.reserve(&address, bytes, 0, 0, 0), "cuMemAddressReserve", bytes));
  absl::Status status = Check(driver.map(address, bytes, 0, memory, 0), "cuMemMap", bytes);
  if (status.ok()) {
    const CUmemAccessDesc access = {.location = kind.location,
                                    .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    status = Check(driver.set_access(address, bytes, &access, 1), "cuMemSetAccess", bytes);
    if (status.ok()) return address;
    static_cast<void>(driver.unmap(address, bytes));
  }
  static_cast<void>(driver.free_address(address, bytes));
  return status;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SharedBlock>> SharedBlock::Create(int device, uint64_t bytes,
                                                                 OwnedFd* descriptor) {
  ATTND_ASSIGN_OR_RETURN(const Driver* const driver, Driver::Load());
  CUmemAllocationProp kind = {};
  kind.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  kind.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  kind.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  kind.location.id = device;
  CUmemGenericAllocationHandle memory = 0;
  ATTND_RETURN_IF_ERROR(Check(driver->create(&memory, bytes, &kind, 0), "cuMemCreate", bytes));
  int fd = -1;
  absl::Status status =
      Check(driver->export_handle(&fd, memory, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
            "cuMemExportToShareableHandle", bytes);
  OwnedFd exported(fd);
  absl::StatusOr<CUdeviceptr> address = status;
  if (status.ok()) address = MapMemory(*driver, kind, memory, bytes);
  static_cast<void>(driver->release(memory));
  if (!address.ok()) return address.status();
  *descriptor = std::move(exported);
  return std::unique_ptr<SharedBlock>(
      new SharedBlock(reinterpret_cast<std::byte*>(*address), bytes));
}

SharedBlock::~SharedBlock() {
  const absl::StatusOr<const Driver*> driver = Driver::Load();
  const auto address = reinterpret_cast<CUdeviceptr>(data_);
  static_cast<void>((*driver)->unmap(address, bytes_));
  static_cast<void>((*driver)->free_address(address, bytes_));
}

}  // namespace attnd::gpu
