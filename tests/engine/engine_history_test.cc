// SPDX-License-Identifier: Apache-2.0
//
// Goal: whatever is done to sequences, each holds exactly the tokens that were given to it, and
// memory in use is that of the sequences that are left. Method: random operations (chunks, whole
// and half steps, repeats, finished prefills, truncations, forks, closing) on several sequences
// beside a plain model of each; lengths and dense answers of all sequences are compared with the
// models, so that an operation on one that reaches into another is seen. Segments are built in the
// background meanwhile.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "tests/cross.h"
#include "tests/engine/support.h"

namespace attnd::engine::test {
namespace {

constexpr size_t kSequencesMax = 6;
constexpr uint64_t kTokensMax = 3000;

class Histories {
 public:
  Histories(uint64_t seed, const ModelShape& shape, const char* window)
      : random_(seed), shape_(shape), policy_(PolicyOf("dense", {{"window", window}})) {
    EngineOptions options = SmallOptions();
    options.index_threads = 2;
    options.segment_tokens = 512 + static_cast<uint32_t>(random_.Below(400));  // ends anywhere
    engine_ = MakeEngine(options);
    Open();
  }

  void Step() {
    if (sequences_.empty()) Open();
    current_ = random_.Below(sequences_.size());
    switch (random_.Below(10)) {
      case 0:
        return AppendChunk();
      case 1:
        return Level();
      case 2:
        return Finish();
      case 3:
        return Truncate();
      case 4:
        return Fork();
      case 5:
        return random_.Below(3) == 0 ? Close() : Open();
      case 6:
        return Repeat();
      default:
        return Decode();
    }
  }

  void CheckAll() {
    for (TestSequence& sequence : sequences_) {
      ASSERT_TRUE(MatchesModel(&sequence, &random_)) << "sequence " << sequence.id;
      CheckWindow(sequence);
    }
  }

  void CloseAll() {
    engine_->WaitForBackground();
    while (!sequences_.empty()) {
      current_ = 0;
      Close();
    }
    EXPECT_EQ(engine_->usage().resident_bytes, 0u);
    EXPECT_EQ(engine_->usage().sequences, 0u);
  }

  const std::string log() const { return log_.str(); }

 private:
  TestSequence& current() { return sequences_[current_]; }

  void Open() {
    if (sequences_.size() >= kSequencesMax) return;
    sequences_.push_back(OpenSequence(engine_.get(), shape_, policy_));
    log_ << "open " << sequences_.back().id << "\n";
  }

  void AppendChunk() {
    const uint32_t layer = static_cast<uint32_t>(random_.Below(shape_.layers));
    const uint64_t have = current().history.layers[layer].tokens;
    if (have >= kTokensMax) return;
    const uint64_t tokens = 1 + random_.Below(random_.Below(2) == 0 ? 20 : 900);
    log_ << current().id << " append layer " << layer << " tokens " << tokens << "\n";
    ASSERT_TRUE(AppendNext(&current(), layer, RandomKv(shape_, tokens, &random_)).ok());
  }

  // Extends every layer to the longest one's length.
  void Level() {
    uint64_t most = 0;
    for (const Kv& layer : current().history.layers) most = std::max(most, layer.tokens);
    log_ << current().id << " level to " << most << "\n";
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      const uint64_t missing = most - current().history.layers[layer].tokens;
      if (missing == 0) continue;
      ASSERT_TRUE(AppendNext(&current(), layer, RandomKv(shape_, missing, &random_)).ok());
    }
  }

  void Finish() {
    Level();
    log_ << current().id << " finish\n";
    FinishPrefill(&current());
  }

  void Decode() {
    if (current().history.layers[0].tokens >= kTokensMax) return;
    const uint64_t steps = 1 + random_.Below(random_.Below(4) == 0 ? 100 : 4);
    const uint32_t tokens = 1 + static_cast<uint32_t>(random_.Below(4));
    log_ << current().id << " decode " << steps << " steps of " << tokens << "\n";
    for (uint64_t step = 0; step < steps; ++step) {
      const bool half = step + 1 == steps && random_.Below(3) == 0;
      for (uint32_t layer = 0; layer < (half ? 1 : shape_.layers); ++layer) {
        last_ = NextRow(&current(), layer, tokens, &random_);
        last_layer_ = layer;
        last_id_ = current().id;
        ASSERT_TRUE(SendRow(*last_, layer).row_status(0).ok());
      }
    }
  }

  // The last step again, if its sequence still has it and no segment does.
  void Repeat() {
    if (!last_.has_value() || current().id != last_id_) return;
    if (current().Info().layer_tokens[last_layer_] < last_->position + last_->query_tokens) return;
    log_ << current().id << " repeat position " << last_->position << "\n";
    last_->sequence = &current();
    const Message message(last_layer_, {*last_});
    const Answer answer = Send(engine_.get(), message);
    if (answer.row_status(0).code() == absl::StatusCode::kFailedPrecondition) {
      ASSERT_LT(last_->position, current().Info().segmented_tokens);
    } else {
      ASSERT_TRUE(IsDense(message, answer, 0));
    }
  }

  uint64_t RandomLength() {
    const uint64_t committed = current().history.committed();
    switch (random_.Below(5)) {
      case 0:
        return 0;
      case 1:
        return committed;
      case 2:
        return committed / 64 * 64;
      default:
        return random_.Below(committed + 1);
    }
  }

  void Truncate() {
    const uint64_t length = RandomLength();
    log_ << current().id << " truncate " << length << "\n";
    const auto segmented = engine_->Truncate(kTenant, current().id, length);
    ASSERT_TRUE(segmented.ok()) << segmented.status();
    EXPECT_LE(*segmented, length);
    current().history.Truncate(length);
    last_.reset();  // what comes in its place differs
  }

  void Fork() {
    if (sequences_.size() >= kSequencesMax) return;
    const uint64_t length = RandomLength();
    const bool all = length == current().history.committed() && random_.Below(2) == 0;
    const auto fork =
        engine_->Fork(kTenant, current().id, all ? std::nullopt : std::optional<uint64_t>(length));
    ASSERT_TRUE(fork.ok()) << fork.status();
    log_ << current().id << " fork " << length << " -> " << fork->id << "\n";
    TestSequence child(engine_.get(), fork->id, shape_);
    child.history = current().history;
    child.history.Truncate(length);
    sequences_.push_back(std::move(child));
  }

  void Close() {
    log_ << current().id << " close\n";
    ASSERT_TRUE(engine_->Close(kTenant, current().id).ok());
    sequences_.erase(sequences_.begin() + static_cast<ptrdiff_t>(current_));
    last_.reset();
  }

  // The newest tokens are in no segment, and bytes follow tokens.
  void CheckWindow(const TestSequence& sequence) {
    const SequenceInfo info = sequence.Info();
    if (info.segmented_tokens > 0) {
      EXPECT_GE(info.committed_tokens, info.segmented_tokens + policy_.window);
    }
    EXPECT_EQ(info.segments == 0, info.segmented_tokens == 0);
    EXPECT_EQ(info.resident_bytes == 0, info.layer_tokens == std::vector<uint64_t>(shape_.layers));
  }

  Random random_;
  const ModelShape shape_;
  const attention::Policy policy_;
  std::unique_ptr<Engine> engine_;
  std::vector<TestSequence> sequences_;
  size_t current_ = 0;
  std::optional<Row> last_;
  uint32_t last_layer_ = 0;
  uint64_t last_id_ = 0;
  std::ostringstream log_;
};

class EngineHistoryTest : public testing::TestWithParam<int> {};

TEST_P(EngineHistoryTest, RandomOperations) {
  const uint64_t seed = TestSeed() + static_cast<uint64_t>(GetParam());
  const ModelShape shapes[] = {
      MakeShape(2, 1, 1, 16, 16, DType::kBf16), MakeShape(1, 4, 2, 16, 32, DType::kFp32),
      MakeShape(3, 2, 2, 32, 16, DType::kFp16), MakeLatentShape(2, 2, 48, 32, DType::kBf16)};
  const char* windows[] = {"64", "0", "200"};
  Histories histories(seed, shapes[seed % 4], windows[seed / 4 % 3]);
  SCOPED_TRACE(testing::Message() << "ATTND_TEST_SEED " << TestSeed() << " case " << GetParam()
                                  << ", shape " << seed % 4 << ", window "
                                  << windows[seed / 4 % 3]);
  for (int step = 0; step < 400; ++step) {
    histories.Step();
    if (step % 6 == 5) histories.CheckAll();
    if (HasFailure()) FAIL() << "step " << step << "\n" << histories.log();
  }
  histories.CloseAll();
}

INSTANTIATE_TEST_SUITE_P(Seeds, EngineHistoryTest, testing::Range(0, attnd::test::Repetitions(12)));

// Every place where a history can be cut, around the borders of segments, blocks and pages.
TEST(EngineHistoryTest, CutsAtEveryBorder) {
  Random random(TestSeed());
  const auto engine = MakeEngine(SmallOptions());
  TestSequence sequence = OpenSequence(engine.get(), MakeShape(1, 2, 2, 16, 16, DType::kFp32));
  Prefill(&sequence, 1400, &random);
  FinishPrefill(&sequence);
  Generate(&sequence, 3, &random);
  for (const uint64_t border : {0u, 16u, 64u, 512u, 576u, 1024u, 1088u, 1344u, 1403u}) {
    for (int64_t offset = -1; offset <= 1; ++offset) {
      const uint64_t length = static_cast<uint64_t>(
          std::clamp<int64_t>(static_cast<int64_t>(border) + offset, 0, 1403));
      SCOPED_TRACE(testing::Message() << "seed " << TestSeed() << " length " << length);
      const auto fork = engine->Fork(kTenant, sequence.id, length);
      ASSERT_TRUE(fork.ok()) << fork.status();
      TestSequence child(engine.get(), fork->id, sequence.shape());
      child.history = sequence.history;
      child.history.Truncate(length);
      EXPECT_EQ(fork->committed_tokens, length);
      EXPECT_EQ(fork->segmented_tokens, length < 576 ? 0u : length < 1088 ? 512u : 1024u);
      ASSERT_TRUE(MatchesModel(&child, &random));
      Generate(&child, 2, &random);
      ASSERT_TRUE(MatchesModel(&child, &random));
      ASSERT_TRUE(engine->Truncate(kTenant, child.id, length / 2).ok());
      child.history.Truncate(length / 2);
      Generate(&child, 2, &random);
      ASSERT_TRUE(MatchesModel(&child, &random));
      ASSERT_TRUE(engine->Close(kTenant, child.id).ok());
    }
  }
  EXPECT_TRUE(MatchesModel(&sequence, &random));
  ASSERT_TRUE(engine->Close(kTenant, sequence.id).ok());
  engine->WaitForBackground();  // it may be about to find a child closed that had a run to build
  EXPECT_EQ(engine->usage().resident_bytes, 0u);
}

}  // namespace
}  // namespace attnd::engine::test
