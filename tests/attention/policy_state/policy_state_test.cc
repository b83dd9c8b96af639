// SPDX-License-Identifier: Apache-2.0
//
// PolicyState: what views, shorter histories and forks have of it, that its version tells each
// change, and that refused memory changes nothing. Method: a state of two layers is changed by hand
// and its views are compared part by part; bytes that it holds are counted. Broken preconditions
// stop the process.
#include "attention/policy_state/policy_state.h"

#include <memory>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace attnd::attention::test {
namespace {

constexpr IndexSet kTwoLevels = {IndexKind::kBlocks64, IndexKind::kLabels};

class PolicyStateTest : public testing::Test {
 protected:
  PolicyStateTest() {
    shape_.layers = 2;
    shape_.query_heads = 4;
    shape_.kv_heads = 2;
    shape_.head_dim = 64;
    shape_.value_dim = 64;
    shape_.dtype = DType::kFp32;
  }

  PolicyState Make(const IndexSet& indexes, ModelParts parts = {}) {
    const auto hold = [this](uint64_t bytes,
                             const char* what) -> absl::StatusOr<std::shared_ptr<const void>> {
      if (refuses_) return absl::ResourceExhaustedError(what);
      held_bytes_ += bytes;
      return std::shared_ptr<const void>(this,
                                         [this, bytes](const void*) { held_bytes_ -= bytes; });
    };
    return PolicyState(shape_, indexes, std::move(parts), hold);
  }

  size_t heads() const { return size_t{shape_.layers} * shape_.kv_heads; }
  std::vector<float> Magnitudes(float value) const {
    return std::vector<float>(size_t{shape_.kv_heads} * shape_.head_dim, value);
  }
  std::shared_ptr<const KeepSet> MakeKeepSet(uint64_t ranked) const {
    auto keep = std::make_shared<KeepSet>();
    keep->ranked_tokens = ranked;
    keep->positions =
        std::make_shared<const KeepSet::Positions>(KeepSet::Positions(heads(), {5, 90, 150}));
    return keep;
  }

  ModelShape shape_;
  bool refuses_ = false;
  uint64_t held_bytes_ = 0;
};

TEST_F(PolicyStateTest, AnEmptyStateShowsWhatItsIndexesNeed) {
  EXPECT_EQ(Make(kClusterIndexes).View(nullptr).recall, nullptr);
  const PolicyView view = Make(kTwoLevels).View(nullptr);
  EXPECT_NE(view.recall, nullptr);
  EXPECT_EQ(view.keep, nullptr);
  EXPECT_EQ(view.label_choice, nullptr);
}

TEST_F(PolicyStateTest, TheVersionTellsEachChange) {
  PolicyState state = Make(kTwoLevels);
  uint64_t version = state.version();
  static_cast<void>(state.View(nullptr));
  EXPECT_EQ(state.version(), version);
  ASSERT_TRUE(state.WeighLabels(0, Magnitudes(2)).ok());
  EXPECT_GT(state.version(), version);
  version = state.version();
  state.SetKeepSet(MakeKeepSet(200), 200);
  EXPECT_GT(state.version(), version);
  EXPECT_GT(state.Truncated(100, true).version(), state.version());
}

TEST_F(PolicyStateTest, QueriesWeighLabelsUnlessAFileSaysTheChannels) {
  PolicyState state = Make(kTwoLevels);
  ASSERT_TRUE(state.WeighLabels(1, Magnitudes(3)).ok());
  const PolicyView before = state.View(nullptr);
  ASSERT_TRUE(state.WeighLabels(0, Magnitudes(2)).ok());
  // The layer without queries counts by its keys; a view that was given out does not change.
  EXPECT_EQ(before.label_choice->QueryMagnitudesOf(0, shape_)[0], 1);
  EXPECT_EQ(before.label_choice->QueryMagnitudesOf(2, shape_)[0], 3);
  EXPECT_EQ(state.View(nullptr).label_choice->QueryMagnitudesOf(1, shape_)[63], 2);
  EXPECT_EQ(held_bytes_, 2 * heads() * shape_.head_dim * sizeof(float));

  ModelParts parts;
  auto channels = std::make_shared<LabelChoice>();
  channels->channels.resize(heads() * LabelChannels(shape_));
  parts.label_channels = channels;
  PolicyState from_file = Make(kTwoLevels, parts);
  ASSERT_TRUE(from_file.WeighLabels(0, Magnitudes(2)).ok());
  EXPECT_EQ(from_file.View(nullptr).label_choice, channels);
}

TEST_F(PolicyStateTest, RefusedMemoryChangesNothing) {
  PolicyState state = Make(kTwoLevels);
  const uint64_t version = state.version();
  refuses_ = true;
  EXPECT_TRUE(absl::IsResourceExhausted(state.WeighLabels(0, Magnitudes(2))));
  EXPECT_EQ(state.version(), version);
  EXPECT_EQ(state.View(nullptr).label_choice, nullptr);
}

TEST_F(PolicyStateTest, ShorterHistoriesShareTheKeepSetsPositions) {
  PolicyState state = Make(kTwoLevels);
  const auto keep = MakeKeepSet(200);
  state.SetKeepSet(keep, 180);  // a truncation to 180 came in between
  EXPECT_EQ(state.View(nullptr).keep->ranked_tokens, 180u);
  const PolicyView shorter = state.Truncated(100, true).View(nullptr);
  EXPECT_EQ(shorter.keep->positions, keep->positions);
  EXPECT_EQ(shorter.keep->KeptBy(3).size(), 2u);  // 5 and 90
  EXPECT_EQ(state.View(nullptr).keep->KeptBy(3).size(), 3u);
  EXPECT_NE(shorter.recall, state.View(nullptr).recall);
  EXPECT_EQ(state.Truncated(500, true).View(nullptr).keep, state.View(nullptr).keep);
}

TEST_F(PolicyStateTest, AForkHasNoObservedQueries) {
  {
    PolicyState state = Make(kTwoLevels);
    ASSERT_TRUE(state.WeighLabels(0, Magnitudes(2)).ok());
    EXPECT_NE(state.Truncated(10, false).View(nullptr).label_choice, nullptr);
    EXPECT_EQ(state.Forked(10, false).View(nullptr).label_choice, nullptr);
  }
  EXPECT_EQ(held_bytes_, 0u);
}

TEST_F(PolicyStateTest, BrokenPreconditionsStopTheProcess) {
  PolicyState clusters = Make(kClusterIndexes);
  EXPECT_DEATH(static_cast<void>(clusters.WeighLabels(0, Magnitudes(2))), "weighs_labels");
  PolicyState labels = Make(kTwoLevels);
  EXPECT_DEATH(static_cast<void>(labels.WeighLabels(2, Magnitudes(2))), "layer < shape_.layers");
  EXPECT_DEATH(labels.SetKeepSet(nullptr, 0), "keep != nullptr");
}

}  // namespace
}  // namespace attnd::attention::test
