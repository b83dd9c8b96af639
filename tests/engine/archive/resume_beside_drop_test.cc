// SPDX-License-Identifier: Apache-2.0
//
// Goal: a sealed sequence that is dropped while it is resumed is unknown, as if the drop had come
// first, and nothing is called damaged for it. Method: the two halves of resuming, with the
// drop between them.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "engine/archive/archive.h"
#include "engine/engine.h"
#include "tests/engine/archive/archive_fixture.h"
#include "tests/storage/io/forwarding_files.h"

namespace attnd::engine::test {
namespace {

// The operating system's files, with something that happens once a file has been opened.
class ShowingFiles final : public storage::test::ForwardingFiles {
 public:
  absl::StatusOr<std::unique_ptr<storage::File>> Open(const std::string& path) override {
    auto opened = ForwardingFiles::Open(path);
    if (const auto then = std::exchange(opened_, nullptr)) then();
    return opened;
  }
  // What the next Open does, once.
  void OnceOpened(std::function<void()> then) { opened_ = std::move(then); }

 private:
  std::function<void()> opened_;
};

class ResumeBesideDropTest : public ArchiveFixture {
 protected:
  // A sequence with a segment, sealed by an engine that is gone.
  void SetUp() override {
    Start();
    const SealResult sealed = SealNew(600);
    ASSERT_EQ(sealed.segments, 1u);
    sealed_id_ = sealed.sealed_id;
    engine_.reset();
    auto files = std::make_unique<ShowingFiles>();
    files_ = files.get();
    auto archive = Archive::Open(Options().archive, &budget_, std::move(files));
    ASSERT_TRUE(archive.ok()) << archive.status();
    archive_ = *std::move(archive);
  }
  std::shared_ptr<Sequence> Fresh(const Archive::Sealed& sealed) {
    auto fresh = Sequence::Create(7, kTenant, sealed.tail.metadata.args, 4096, &budget_);
    EXPECT_TRUE(fresh.ok()) << fresh.status();
    return *std::move(fresh);
  }

  MemoryBudget budget_{uint64_t{64} << 20};
  std::unique_ptr<Archive> archive_;
  ShowingFiles* files_ = nullptr;  // the archive's
  uint64_t sealed_id_ = 0;
};

absl::Status GoOn() { return absl::OkStatus(); }

TEST_F(ResumeBesideDropTest, WhatIsDroppedBeforeItsSegmentsAreReadIsUnknown) {
  const auto opened = archive_->OpenSealed(kTenant, sealed_id_);
  ASSERT_TRUE(opened.ok()) << opened.status();
  ASSERT_TRUE(archive_->Drop(kTenant, sealed_id_).ok());
  const absl::Status resumed = archive_->Resume(*opened, Fresh(*opened).get(), GoOn);
  EXPECT_TRUE(absl::IsNotFound(resumed)) << resumed;
  EXPECT_EQ(resumed, archive_->OpenSealed(kTenant, sealed_id_).status());
}

// Its files stay for who reads them, and can be sealed again.
TEST_F(ResumeBesideDropTest, WhatIsDroppedWhileASegmentIsReadCanBeSealedAgain) {
  const auto opened = archive_->OpenSealed(kTenant, sealed_id_);
  ASSERT_TRUE(opened.ok()) << opened.status();
  const auto fresh = Fresh(*opened);
  absl::Status dropped = absl::UnknownError("not tried");
  files_->OnceOpened([&] { dropped = archive_->Drop(kTenant, sealed_id_); });
  const absl::Status resumed = archive_->Resume(*opened, fresh.get(), GoOn);
  ASSERT_TRUE(dropped.ok()) << dropped;
  ASSERT_TRUE(resumed.ok()) << resumed;
  const auto again = archive_->Seal(fresh.get(), GoOn);
  ASSERT_TRUE(again.ok()) << again.status();
  const auto reopened = archive_->OpenSealed(kTenant, again->sealed_id);
  ASSERT_TRUE(reopened.ok()) << reopened.status();
  EXPECT_TRUE(archive_->Resume(*reopened, Fresh(*reopened).get(), GoOn).ok());
}

}  // namespace
}  // namespace attnd::engine::test
