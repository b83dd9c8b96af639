// SPDX-License-Identifier: Apache-2.0
//
// Goal: the emulated device sees the faults that it is for, and none where there is none. Method:
// small kernels with one fault each, and the same without it.
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <ostream>
#include <string>

#include "gpu/device/device.h"
#include "tests/gpu/emulated/faulty_kernels.h"

namespace attnd::gpu::emulated {
namespace {

struct Faulty {
  std::string name;
  FaultyKernel kernel;
  std::string seen;
};
void PrintTo(const Faulty& faulty, std::ostream* out) { *out << faulty.name; }

const Faulty kFaulty[] = {
    {"ReadsANeighboursWord", ReadsANeighboursWord, "without a barrier"},
    {"ReadsANeighboursWordInItsWarp", ReadsANeighboursWordInItsWarp, "without a barrier"},
    {"OverwritesWhatIsRead", OverwritesWhatIsRead, "writes what another thread reads"},
    {"LeavesDeviceMemory", LeavesDeviceMemory, "no kernel may write"},
    {"LeavesSharedMemory", LeavesSharedMemory, "leaves its shared memory"},
    {"LeavesAnArray", LeavesAnArray, "leaves an array's bounds"},
    {"LoadsUnaligned", LoadsUnaligned, "unaligned"},
    {"ReadsBeforeTheCopyHasEnded", ReadsBeforeTheCopyHasEnded, "still writing"},
    {"AddsWithoutAtomics", AddsWithoutAtomics, "without a barrier"},
    {"ShufflesBesideABarrier", ShufflesBesideABarrier, "comes to a"},
    {"WritesAcrossBlocks", WritesAcrossBlocks, "writes what another thread writes"},
};

class EmulatedDevice : public testing::TestWithParam<Faulty> {};

TEST_P(EmulatedDevice, SeesAFault) {
  uint32_t words[kFaultyWords];
  RunFaulty(GetParam().kernel, /*right=*/true, words);
  bool seen = false;
  // Of two threads that meet, which one is said depends on who comes first.
  for (int run = 0; run < 20 && !seen; ++run) {
    testing::TestPartResultArray failures;
    {
      const testing::ScopedFakeTestPartResultReporter reporter(
          testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &failures);
      RunFaulty(GetParam().kernel, /*right=*/false, words);
    }
    EXPECT_GT(failures.size(), 0) << "run " << run;
    for (int i = 0; i < failures.size(); ++i) {
      seen |= std::string(failures.GetTestPartResult(i).message()).find(GetParam().seen) !=
              std::string::npos;
    }
  }
  EXPECT_TRUE(seen);
}

INSTANTIATE_TEST_SUITE_P(Kernels, EmulatedDevice, testing::ValuesIn(kFaulty),
                         [](const auto& c) { return c.param.name; });

// Shared memory that nobody wrote holds what a test would not take for an answer.
TEST(EmulatedDeviceMemory, SharedMemoryIsRubbishAtFirst) {
  uint32_t words[kFaultyWords];
  RunFaulty(ReadsWhatNobodyWrote, /*right=*/true, words);
  for (const uint32_t word : words) EXPECT_EQ(word, 0u);
  RunFaulty(ReadsWhatNobodyWrote, /*right=*/false, words);
  for (const uint32_t word : words) EXPECT_NE(word, 0u);
}

// Threads that wait for what never comes.
TEST(EmulatedDeviceDeathTest, SeesThatNoThreadCanGoOn) {
  uint32_t words[kFaultyWords];
  RunFaulty(LeavesABarrierOut, /*right=*/true, words);
  EXPECT_DEATH(RunFaulty(LeavesABarrierOut, /*right=*/false, words), "all threads wait for ever");
}

// It is launched: the kernel's symbol is there, and the stream is as usable as before.
TEST(EmulatedCudaDevice, RunsAnEmptyKernel) {
  const auto device = OpenCudaDevice();
  ASSERT_TRUE(device.ok()) << device.status();
  const auto stream = (*device)->NewStream(StreamUse::kSteps);
  ASSERT_TRUE(stream.ok()) << stream.status();
  for (int i = 0; i < 2; ++i) {
    const auto time = (*stream)->RunEmpty();
    ASSERT_TRUE(time.ok()) << time.status();
    EXPECT_GT(time->count(), 0);
  }
  EXPECT_TRUE((*stream)->Synchronize().ok());
}

}  // namespace
}  // namespace attnd::gpu::emulated
