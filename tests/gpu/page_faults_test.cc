// SPDX-License-Identifier: Apache-2.0
//
// Goal: whatever happens to a device while steps use its cache of pages, no answer is wrong and
// nothing is lost. Method: faults at every call of a step, and in its middle, and steps that meet
// at the cache; the fake device fetches pages as the fetch stage does, and compares the bytes of
// each that is found with host memory.
#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <vector>

#include "tests/gpu/agreement.h"
#include "tests/gpu/support.h"

namespace attnd::gpu::test {
namespace {

using attention::kTreeIndexes;
using attention::test::RunStep;
using attention::test::StepResult;
using attention::test::TestRow;
using attention::test::TestSequence;

class PageFaults : public testing::Test {
 protected:
  // A backend with a cache that has pages of layer 0 of `first_`.
  void Start() {
    CudaBackendOptions options = OfPages(kFewPages);
    options.on_degraded = [this](const absl::Status& status) { told_.push_back(status); };
    told_.clear();
    fake_ = MakeFakeBackend(options, /*maps_host_memory=*/true);
    Step(&first_, 0);
    ASSERT_GT(fake_.backend->stats().cache.bytes, 0u);
  }
  // A dense one, and a few that choose.
  static std::vector<TestRow> Rows(TestSequence* sequence, uint32_t layer) {
    std::vector<TestRow> rows = RowsOfLayer(sequence, layer);
    rows.erase(rows.begin() + 1, rows.begin() + 4);
    rows.resize(4);
    return rows;
  }
  void Step(TestSequence* sequence, uint32_t layer) const {
    const std::vector<TestRow> rows = Rows(sequence, layer);
    EXPECT_TRUE(Agree(RunStep(fake_.backend.get(), layer, rows),
                      RunStep(MakeCpu().get(), layer, rows), rows));
  }
  // A step that the device fails: its answers are the CPU's, to the bit.
  void ExpectCpus(TestSequence* sequence, uint32_t layer) const {
    const std::vector<TestRow> rows = Rows(sequence, layer);
    const StepResult step = RunStep(fake_.backend.get(), layer, rows);
    const StepResult expected = RunStep(MakeCpu().get(), layer, rows);
    ASSERT_TRUE(step.status.ok()) << step.status;
    for (size_t r = 0; r < rows.size(); ++r) {
      EXPECT_TRUE(SameBits(step.rows[r], expected.rows[r])) << "row " << r;
    }
  }
  void ExpectFailed() const {
    ASSERT_EQ(told_.size(), 1u) << "the fault is told once";
    EXPECT_TRUE(absl::IsInternal(told_[0])) << told_[0];
    EXPECT_FALSE(fake_.backend->Health().ok());
  }

  const uint64_t seed_ = attention::test::TestSeed();
  const testing::ScopedTrace trace_{__FILE__, __LINE__, testing::Message() << "seed " << seed_};
  std::vector<absl::Status> told_;
  FakeBackend fake_;
  TestSequence first_ = HostSequence(0, kTreeIndexes);
  TestSequence second_ = HostSequence(1, kTreeIndexes);
};

// Half of the step's rows have their answers, and the pages that it missed are half there.
TEST_F(PageFaults, AFaultInTheMiddleOfAStepWithMisses) {
  Start();
  fake_.control->Set({.step_midway = true});
  ExpectCpus(&second_, 0);
  ExpectFailed();
  const uint64_t steps = fake_.control->steps();
  for (const uint32_t layer : {0, 1}) {
    ExpectCpus(&first_, layer);
    ExpectCpus(&second_, layer);
  }
  EXPECT_EQ(fake_.control->steps(), steps) << "the device is asked no more";
  ExpectFailed();
}

// A step that misses pages, and maps and uploads what it reads.
TEST_F(PageFaults, AFaultAtEveryCallOfAStepWithMisses) {
  uint64_t calls = 0;
  for (bool failed = true; failed; ++calls) {
    SCOPED_TRACE(calls);
    ASSERT_LT(calls, 100u);
    Start();
    fake_.control->Set({.call = calls});
    Step(&second_, 1);
    failed = !fake_.backend->Health().ok();
    if (!failed) continue;
    ExpectCpus(&second_, 1);
    ExpectCpus(&first_, 0);
    ExpectFailed();
    fake_.backend.reset();
  }
  EXPECT_GT(calls, 8u);
}

// Each step's pages stay until it has read them, whoever uses the cache beside it.
TEST_F(PageFaults, StepsShareTheCache) {
  Start();
  std::vector<std::thread> threads;
  for (TestSequence* const sequence : {&first_, &second_}) {
    threads.emplace_back([this, sequence] {
      for (int step = 0; step < 16; ++step) Step(sequence, static_cast<uint32_t>(step % 2));
    });
  }
  for (std::thread& thread : threads) thread.join();
  // A step is the CPU's where its tail finds no room while the other one's step uses the cache. On
  // a busy machine that is so for the first steps of both; later ones find their tails there.
  EXPECT_LT(fake_.backend->stats().fallback_steps, 16u);
}

// The memory of a cache is whole segments' in between, and comes back with their bytes in it.
TEST_F(PageFaults, ANewCacheBeginsEmpty) {
  Start();
  for (int round = 0; round < 2; ++round) {
    first_ = TestSequence();
    second_ = TestSequence();
    EXPECT_EQ(fake_.backend->stats().cache.bytes, 0u);
    TestSequence small = HostSequence(2 + static_cast<uint64_t>(round), kTreeIndexes);
    second_ = HostSequence(4 + static_cast<uint64_t>(round), kTreeIndexes);
    Step(&second_, 0);
    Step(&small, 0);
    Step(&second_, 0);
    EXPECT_GT(fake_.backend->stats().cache.bytes, 0u);
  }
}

}  // namespace
}  // namespace attnd::gpu::test
