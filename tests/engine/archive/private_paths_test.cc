// SPDX-License-Identifier: Apache-2.0
//
// Goal: no client learns where the server keeps its files. Method: messages as storage/ makes them;
// an engine whose files are damaged, gone or cannot be written, and what every call then says.
#include "engine/archive/private_paths.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "tests/engine/archive/archive_fixture.h"
#include "tests/engine/support.h"

namespace attnd::engine::test {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

TEST(PrivatePathsTest, FilesHaveNumbersAndTheRestHasNoName) {
  const auto told = [](const std::string& message) {
    return std::string(WithoutPaths(absl::DataLossError(message), "/my data").message());
  };
  EXPECT_EQ(told("/my data/segments/1f/000000000000011f.seg: page 3: wrong checksum"),
            "segment file 287: page 3: wrong checksum");
  EXPECT_EQ(told("writing /my data/segments/1f/000000000000001f.seg: open "
                 "/my data/segments/1f/000000000000001f.seg.tmp: No space left on device"),
            "writing segment file 31: open segment file 31: No space left on device");
  EXPECT_EQ(told("the catalogue in /my data/catalogue: IO error: /my data/catalogue/000004.log"),
            "the catalogue in the data folder: IO error: the data folder");
  EXPECT_EQ(told("sync /my data/segments/1f: Input/output error"),
            "sync the data folder: Input/output error");
  EXPECT_EQ(told("model is /none of ours"), "model is /none of ours");
  EXPECT_EQ(told("/my data"), "the data folder");
  EXPECT_TRUE(WithoutPaths(absl::OkStatus(), "/my data").ok());
}

// What the server's log is told.
class Log : public EventListener {
 public:
  void OnDiskFault(const absl::Status& status) override {
    const std::lock_guard lock(mutex_);
    last_ = std::string(status.message());
  }
  std::string Take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(last_, "");
  }

 private:
  std::mutex mutex_;
  std::string last_;
};

class PrivatePathsOfAnEngine : public ArchiveFixture {
 protected:
  PrivatePathsOfAnEngine() : ArchiveFixture(MakeShape(1, 2, 1, 64, 64, DType::kBf16)) { Start(); }
  ~PrivatePathsOfAnEngine() override { engine_.reset(); }  // before the log
  void Start() { ArchiveFixture::Start(Options(), &log_); }
  void ExpectTold(const absl::Status& status, absl::StatusCode code, const std::string& what) {
    SCOPED_TRACE(status);
    EXPECT_EQ(status.code(), code);
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(what), Not(HasSubstr("/"))));
    EXPECT_THAT(log_.Take(), HasSubstr(folder_.path())) << "for whoever runs the server";
  }

  Log log_;
};

TEST_F(PrivatePathsOfAnEngine, EveryRefusalSaysWhatIsLostAndNotWhere) {
  TestSequence sequence = Open();
  Prefill(&sequence, 1100, &random_);
  FinishPrefill(&sequence);
  const uint64_t sealed = Seal(sequence).sealed_id;
  const History history = sequence.history;
  const std::string named = "sealed sequence " + std::to_string(sealed);
  const std::vector<fs::path> files = Files();  // two segments and a tail
  ASSERT_EQ(files.size(), 3u);
  Start();

  // A file that cannot be written: its folder is gone.
  TestSequence other = Open();
  Prefill(&other, 30, &random_);
  fs::rename(folder_.Path("segments"), folder_.Path("elsewhere"));
  ExpectTold(engine_->Seal(kTenant, other.id, nullptr).status(), absl::StatusCode::kNotFound,
             "segment file");
  fs::rename(folder_.Path("elsewhere"), folder_.Path("segments"));

  // A page: the step that reads it finds it.
  TestSequence resumed = Resume(sealed, history).value();
  FlipByte(files[1], fs::file_size(files[1]) / 2);
  const Message message(0, {QueryOnlyRow(&resumed, 0, 1, &random_)});
  ExpectTold(Send(engine_.get(), message).row_status(0), absl::StatusCode::kDataLoss,
             "positions 512..1023 are lost");
  ExpectTold(engine_->Fork(kTenant, resumed.id, 600).status(), absl::StatusCode::kDataLoss,
             "positions 512..1023 are lost");

  // The tail, and the header of the first segment of another sequence.
  FlipByte(files[2], 100);
  ExpectTold(Resume(sealed, history).status(), absl::StatusCode::kDataLoss, named);
  const uint64_t second = SealNew(600).sealed_id;
  FlipByte(Files()[1], 100);  // behind the first sequence's
  Start();
  ExpectTold(Resume(second, history).status(), absl::StatusCode::kDataLoss,
             "positions 0..511 are lost");
}

}  // namespace
}  // namespace attnd::engine::test
