// SPDX-License-Identifier: Apache-2.0
//
// attnd over the fake device, for tests of the whole program:
//
//   ATTND_FAKE_GPU_FAULT=FILE fake_gpu_attnd FLAGS...
//
// When FILE comes to be, the device fails at its next call and at every one after it, and FILE
// goes. With ATTND_FAKE_EMPTY_RUN_US=N an empty kernel takes N microseconds, by what the device
// says.
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "server/program.h"
#include "tests/gpu/fake_device.h"

namespace attnd::gpu::test {
namespace {

constexpr uint64_t kMemoryBytes = uint64_t{256} << 20;

void FailWhenAsked(const std::string& file, const std::shared_ptr<FakeControl>& control) {
  std::thread([file, control] {
    while (!std::filesystem::exists(file))
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    control->Set({.call = 0});
    std::filesystem::remove(file);
  }).detach();
}

absl::StatusOr<std::unique_ptr<Device>> OpenFakeDevice() {
  FakePair fake = MakeFakeDevice(kMemoryBytes, /*maps_host_memory=*/true);
  const char* const file = std::getenv("ATTND_FAKE_GPU_FAULT");
  if (file != nullptr) FailWhenAsked(file, fake.control);
  const char* const micros = std::getenv("ATTND_FAKE_EMPTY_RUN_US");
  if (micros != nullptr) {
    fake.control->Set({.empty_run = std::chrono::microseconds(std::strtol(micros, nullptr, 10))});
  }
  return std::move(fake.device);
}

}  // namespace
}  // namespace attnd::gpu::test

int main(int argc, char** argv) {
  return attnd::server::RunProgram(argc, argv, attnd::gpu::test::OpenFakeDevice);
}
