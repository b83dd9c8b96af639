// SPDX-License-Identifier: Apache-2.0
//
// Goal: the CUDA backend builds a segment's tree on the device, and host and device then have the
// same segment; a tree that cannot be built there, or comes back damaged, is refused and leaves
// nothing behind, so that the CPU's builder can take over. Method: seeded random keys and values
// over the fake device, whose loops build trees; the oracle describes what was built. Faults come
// at each call.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "attention/index/segment_builder.h"
#include "tests/attention/segment_support.h"
#include "tests/attention/tree_support.h"
#include "tests/gpu/support.h"
#include "tests/oracle/joint_kmeans.h"
#include "tests/tree_indexes.h"

namespace attnd::gpu::test {
namespace {

using attention::IndexKind;
using attention::IndexSet;
using attention::kTreeIndexes;
using attention::Segment;
using attention::SegmentBuilder;
using attention::SequenceView;
using attention::test::AssignmentOf;
using attention::test::ExpectPayload;
using attention::test::ExpectTree;
using attention::test::HeadData;
using attention::test::InertiaOf;
using attention::test::MakeHeadData;
using attention::test::MakeShape;
using attention::test::MakeTailView;
using attention::test::Random;
using attention::test::Rows;
using attention::test::Skip;
using attention::test::TestSeed;

absl::Status Proceed() { return absl::OkStatus(); }

attention::SegmentPart AllOf(const SegmentBuilder& builder) {
  return {0, builder.view().shape.layers};
}

// A tail of random tokens of which a segment is built.
struct Tail {
  Tail(const ModelShape& shape, uint64_t begin, uint32_t count,
       const IndexSet& indexes = kTreeIndexes)
      : tokens(count) {
    Random random(TestSeed() + tokens);
    for (uint32_t h = 0; h < shape.layers * shape.kv_heads; ++h) {
      heads.push_back(MakeHeadData(shape, begin + tokens + 5, &random));
    }
    view = Skip(MakeTailView(shape, begin + tokens + 5, heads, indexes), begin);
  }
  SegmentBuilder Builder(uint32_t unclustered = 0) const {
    return {view, 7, {view->shape, view->indexes, tokens, unclustered}};
  }

  const uint32_t tokens;
  std::vector<HeadData> heads;
  std::shared_ptr<const SequenceView> view;
};

// Every head of the segment is as its definition says.
void ExpectTrees(const Segment& segment, const Tail& tail) {
  const ModelShape& shape = segment.shape();
  for (uint32_t h = 0; h < tail.heads.size(); ++h) {
    const uint32_t layer = h / shape.kv_heads, head = h % shape.kv_heads;
    SCOPED_TRACE(testing::Message() << "layer " << layer << ", KV head " << head);
    ExpectPayload(segment, layer, head, tail.heads[h]);
    ExpectTree(segment, layer, head, tail.heads[h]);
    if (testing::Test::HasFailure()) return;
  }
}

class TreeBuild : public testing::Test {
 protected:
  const testing::ScopedTrace trace_{__FILE__, __LINE__,
                                    testing::Message() << "seed " << TestSeed()};
  const ModelShape shape_ = MakeShape(4, 2, 64, 64, DType::kBf16, 2);
};

struct TreeCase {
  uint32_t head_dim, value_dim;
  DType dtype;
  uint32_t begin, tokens, unclustered;
  attention::TreeSizes sizes = {};
};

TEST_F(TreeBuild, TreesAreWhatTheirDefinitionSays) {
  for (const TreeCase& c : {
           TreeCase{64, 64, DType::kBf16, 0, 700, 4},
           TreeCase{64, 64, DType::kFp16, 100, 513, 0},
           TreeCase{128, 128, DType::kBf16, 63, 300, 0},
           TreeCase{192, 128, DType::kFp16, 0, 150, 4},
           TreeCase{64, 64, DType::kBf16, 64, 1, 0},
           TreeCase{64, 64, DType::kBf16, 0, 5, 4},
           TreeCase{64, 64, DType::kFp16, 3, 17, 0},
           TreeCase{64, 64, DType::kBf16, 0, 700, 4, {8, 16, 3}},
           TreeCase{64, 64, DType::kBf16, 5, 513, 0, {12, 8, 2}},
           TreeCase{64, 64, DType::kFp16, 0, 700, 4, {16, 4, 3}},
       }) {
    SCOPED_TRACE(testing::Message() << c.head_dim << "/" << c.value_dim << ", " << c.begin << " + "
                                    << c.tokens << " tokens");
    const FakeBackend fake = MakeFakeBackend();
    const Tail tail(MakeShape(4, 2, c.head_dim, c.value_dim, c.dtype, 2), c.begin, c.tokens,
                    attnd::test::TreeOf(c.sizes));
    SegmentBuilder builder = tail.Builder(c.unclustered);
    const absl::Status status = fake.backend->BuildSegment(&builder, AllOf(builder), Proceed);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(fake.control->builds(), 2u) << "layers";
    ExpectTrees(*builder.Finish(), tail);
    if (HasFailure()) return;
  }
}

// The device's leaves are as good as those of the CPU's builder, and as many.
TEST_F(TreeBuild, LeavesAreAsGoodAsTheCpus) {
  const Tail tail(shape_, 0, 700);
  const FakeBackend fake = MakeFakeBackend();
  SegmentBuilder builder = tail.Builder();
  ASSERT_TRUE(fake.backend->BuildSegment(&builder, AllOf(builder), Proceed).ok());
  const auto built = builder.Finish();
  const auto expected = attention::test::BuildSegment(tail.view, tail.tokens, 0);
  for (uint32_t h = 0; h < tail.heads.size(); ++h) {
    const uint32_t layer = h / shape_.kv_heads, head = h % shape_.kv_heads;
    const auto features = oracle::JointFeatures(
        Rows(tail.heads[h].keys, shape_.head_dim, 0, tail.tokens),
        Rows(tail.heads[h].values, shape_.value_dim, 0, tail.tokens), attention::kValueShare);
    const auto inertia = [&](const Segment& segment) {
      return InertiaOf(features, AssignmentOf(segment, layer, head),
                       segment.clusters(layer, head).clusters);
    };
    EXPECT_NEAR(inertia(*built), inertia(*expected), 0.02 * inertia(*expected));
    EXPECT_NEAR(built->clusters(layer, head).clusters, expected->clusters(layer, head).clusters, 4);
    EXPECT_NEAR(built->groups(layer, head).clusters, expected->groups(layer, head).clusters, 1);
  }
}

// A device that fails at any of the build's calls is given up; the CPU's builder builds the same
// segment.
TEST_F(TreeBuild, AFailureAtAnyCallLeavesNothingBehind) {
  const Tail tail(shape_, 0, 200);
  for (uint64_t call = 0;; ++call) {
    SCOPED_TRACE(testing::Message() << "call " << call);
    ASSERT_LT(call, 100u);
    const FakeBackend fake = MakeFakeBackend();
    fake.control->Set({.call = call});
    SegmentBuilder builder = tail.Builder();
    const absl::Status status = fake.backend->BuildSegment(&builder, AllOf(builder), Proceed);
    if (status.ok()) {
      EXPECT_GT(call, 4u);
      ExpectTrees(*builder.Finish(), tail);
      return;
    }
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
    EXPECT_FALSE(fake.backend->Health().ok());
    EXPECT_FALSE(fake.backend->BuildSegment(&builder, AllOf(builder), Proceed).ok());
    attention::HeadBuilder heads;
    for (uint32_t h = 0; h < builder.heads(); ++h) {
      heads.Start(&builder, h);
      while (!heads.Advance(std::chrono::seconds(1))) {
      }
    }
    ExpectTrees(*builder.Finish(), tail);
    if (HasFailure()) return;
  }
}

TEST_F(TreeBuild, ATreeThatIsNoneIsRefusedAndTheDeviceKept) {
  const FakeBackend fake = MakeFakeBackend();
  const Tail tail(shape_, 0, 300);
  {
    SegmentBuilder builder = tail.Builder();
    fake.control->Set({.bad_index = true});
    const absl::Status status = fake.backend->BuildSegment(&builder, AllOf(builder), Proceed);
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
    EXPECT_TRUE(fake.backend->Health().ok());
  }
  EXPECT_EQ(fake.backend->stats().index.used_bytes, 0u) << "a device copy without a segment";
  fake.control->Set({});
  SegmentBuilder builder = tail.Builder();
  ASSERT_TRUE(fake.backend->BuildSegment(&builder, AllOf(builder), Proceed).ok());
  ExpectTrees(*builder.Finish(), tail);
}

TEST_F(TreeBuild, WithoutScratchForItTheCpuBuilds) {
  CudaBackendOptions options = SmallOptions();
  options.scratch_bytes = uint64_t{1} << 16;
  const FakeBackend fake = MakeFakeBackend(options);
  const Tail tail(shape_, 0, 300);
  SegmentBuilder builder = tail.Builder();
  EXPECT_EQ(fake.backend->BuildSegment(&builder, AllOf(builder), Proceed).code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(fake.control->builds(), 0u);
  EXPECT_TRUE(fake.backend->Health().ok());
}

TEST_F(TreeBuild, OtherIndexesAreTheCpus) {
  const FakeBackend fake = MakeFakeBackend();
  for (const IndexSet& indexes :
       {attention::kRegressionIndexes, IndexSet{IndexKind::kTree, IndexKind::kLabels},
        attnd::test::TreeOf({8, 4, 3})}) {
    const Tail tail(shape_, 0, 100, indexes);
    SegmentBuilder builder = tail.Builder();
    const absl::Status status = fake.backend->BuildSegment(&builder, AllOf(builder), Proceed);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr(indexes.ToString()));
  }
  EXPECT_EQ(fake.control->builds(), 0u);
}

// The device's scratch is a matter of sizes that the host plans with: more for a longer segment.
TEST(IndexScratchBytesTest, GrowsWithTheSegmentAndATreeTakesMore) {
  for (const KernelShape& shape : kKernelShapes) {
    uint64_t before = 0;
    for (const uint32_t tokens : {1u, 64u, 1024u, 8192u, 65536u}) {
      const uint32_t leaves = tokens / 8 + 1, groups = tokens / 64 + 1;
      const uint64_t tree = IndexScratchBytes(shape, 8, {tokens, leaves, groups});
      EXPECT_GT(tree, before);
      EXPECT_GT(tree, IndexScratchBytes(shape, 8, {tokens, leaves, 0}));
      before = tree;
    }
  }
}

}  // namespace
}  // namespace attnd::gpu::test
