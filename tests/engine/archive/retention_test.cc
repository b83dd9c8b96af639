// SPDX-License-Identifier: Apache-2.0
//
// Goal: what nobody has used for too long is dropped in its time, and a clock that is set drops
// nothing before. Method: sealed sequences of an engine, and times of the test's choice.
#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "common/unix_time.h"
#include "engine/archive/archive.h"
#include "engine/engine.h"
#include "tests/engine/archive/archive_fixture.h"

namespace attnd::engine::test {
namespace {

constexpr int64_t kHour = 3600;

class RetentionTest : public ArchiveFixture {
 protected:
  // Three sequences, sealed now.
  RetentionTest() {
    Start();
    for (int i = 0; i < 3; ++i) SealNew(20);
    engine_.reset();
    Restart();
  }
  void Restart() {
    archive_.reset();
    auto archive = Archive::Open(Options().archive, &budget_, nullptr);
    EXPECT_TRUE(archive.ok()) << archive.status();
    archive_ = *std::move(archive);
  }
  // How many a round drops.
  uint64_t Retain(int64_t age_s, int64_t unix_s, int64_t boot_s) {
    const RetentionLimits limits = {.bytes_max = 0, .age_max_s = static_cast<uint64_t>(age_s)};
    return archive_->Retain(limits, unix_s, boot_s).value();
  }

  MemoryBudget budget_{uint64_t{64} << 20};
  std::unique_ptr<Archive> archive_;
  const int64_t now_ = NowUnixSeconds();
};

TEST_F(RetentionTest, WhatIsTooOldIsDropped) {
  for (int64_t passed = 0; passed <= 90; passed += 10) {
    EXPECT_EQ(Retain(100, now_ + passed, passed), 0u) << passed;
  }
  EXPECT_EQ(Retain(100, now_ + 110, 110), 3u);
}

// By ten years: while the server runs, and before it starts.
TEST_F(RetentionTest, AClockThatIsSetForwardDropsNothingAtOnce) {
  constexpr int64_t kYears = 10 * 365 * 24 * kHour, kDay = 24 * kHour;
  EXPECT_EQ(Retain(kDay, now_, 100), 0u);
  EXPECT_EQ(Retain(kDay, now_ + kYears, 110), 0u) << "it was set";
  EXPECT_EQ(Retain(kDay, now_ + kYears, 110 + 8 * kHour), 0u);
  Restart();  // of the machine, too
  EXPECT_EQ(Retain(kDay, now_ + kYears, 5), 0u);
  EXPECT_EQ(Retain(kDay, now_ + kYears, 5 + 3 * kHour), 0u);
  EXPECT_EQ(archive_->List(kTenant, 0, 10)->size(), 3u);
  // It follows in the end, twice as fast as time passes: so the server before this one counts.
  EXPECT_EQ(Retain(kDay, now_ + kYears, 5 + 5 * kHour), 3u);
}

// Set back, and right again: nothing is dropped early for it.
TEST_F(RetentionTest, AClockThatIsSetBackDropsNothing) {
  EXPECT_EQ(Retain(100, now_ - 24 * kHour, 10), 0u);
  EXPECT_EQ(Retain(100, now_ + 30, 40), 0u);
  EXPECT_EQ(Retain(100, now_ + 90, 100), 0u);
}

}  // namespace
}  // namespace attnd::engine::test
