// SPDX-License-Identifier: Apache-2.0
//
// Goal: with a GPU beside it the CPU answers what the GPU has no kernels for, sequence by sequence:
// who has a sequence is decided when it is opened and stays so through building, decoding, forks,
// shared prefixes and resuming; rows of both in one message are what they are alone. Method: the
// engine's test support with its model of histories in double precision, over a fake device.
#include "gpu/auto_backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "tests/engine/support.h"
#include "tests/gpu/support.h"
#include "tests/temporary_folder.h"
#include "tests/tree_indexes.h"

namespace attnd::gpu::test {
namespace {

using attention::IndexKind;
using attention::IndexSet;
using engine::Engine;
using engine::OpenArgs;
using engine::test::Answer;
using engine::test::AnswerOf;
using engine::test::AnswersDense;
using engine::test::ArgsOf;
using engine::test::FinishPrefill;
using engine::test::Generate;
using engine::test::IsDense;
using engine::test::kTenant;
using engine::test::MakeLatentShape;
using engine::test::MakeShape;
using engine::test::MatchesModel;
using engine::test::Message;
using engine::test::NextRow;
using engine::test::PolicyOf;
using engine::test::Prefill;
using engine::test::QueryOnlyRow;
using engine::test::Random;
using engine::test::Row;
using engine::test::TestSeed;
using engine::test::TestSequence;

class AutoEngine : public testing::Test {
 protected:
  AutoEngine() { Start(); }

  // An engine on a device and the CPU; with a disk, on the folder of the one before it.
  void Start(bool disk = false, const CudaBackendOptions& cuda_options = SmallOptions(),
             bool maps_host_memory = false, std::optional<uint64_t> budget_bytes = std::nullopt) {
    engine_.reset();
    FakePair fake = MakeFakeDevice(uint64_t{1} << 30, maps_host_memory);
    control_ = fake.control;
    const std::shared_ptr<attention::Backend> cpu = MakeCpu();
    auto cuda = MakeCudaBackend(cuda_options, std::move(fake.device), cpu);
    ASSERT_TRUE(cuda.ok()) << cuda.status();
    engine::EngineOptions options = engine::test::SmallOptions();
    if (disk) options.archive.data_dir = folder_.path();
    if (budget_bytes.has_value()) options.memory_budget_bytes = *budget_bytes;
    auto engine = Engine::Create(options, MakeAutoBackend(*std::move(cuda), cpu), nullptr);
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
  }

  static OpenArgs Args(const ModelShape& shape,
                       const std::optional<attention::Policy>& policy = std::nullopt,
                       const std::optional<IndexSet>& indexes = std::nullopt) {
    OpenArgs args = ArgsOf(shape, policy);
    args.fingerprint = "model";
    args.indexes = indexes;
    return args;
  }
  TestSequence Open(const OpenArgs& args) {
    const auto id = engine_->Open(kTenant, args);
    EXPECT_TRUE(id.ok()) << id.status();
    return TestSequence(engine_.get(), id.value_or(0), args.shape);
  }
  TestSequence OpenFilled(const OpenArgs& args, uint64_t tokens) {
    TestSequence sequence = Open(args);
    Prefill(&sequence, tokens, &random_);
    FinishPrefill(&sequence);
    return sequence;
  }
  static std::string OwnerOf(const TestSequence& sequence) {
    return std::string(sequence.Info().args.backend->name());
  }
  // Who read the tokens of a row's answer.
  static bool ReadByDevice(const Answer& answer, size_t row) {
    const attention::RowStats& stats = answer.result.rows[row].stats;
    EXPECT_NE(stats.hbm_tokens > 0, stats.host_tokens + stats.ssd_tokens > 0);
    return stats.hbm_tokens > 0;
  }

  const ModelShape shape_ = MakeShape(2, 4, 2, 128, 128, DType::kBf16);
  const uint64_t seed_ = TestSeed();
  const testing::ScopedTrace trace_{__FILE__, __LINE__, testing::Message() << "seed " << seed_};
  Random random_{seed_};
  const attnd::test::TemporaryFolder folder_;
  std::shared_ptr<FakeControl> control_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(AutoEngine, WhatTheDeviceLacksIsTheCpus) {
  const auto owner = [&](const OpenArgs& args) { return OwnerOf(Open(args)); };
  EXPECT_EQ(owner(Args(shape_)), "cuda");
  for (const char* preset : {"dense", "streaming", "clusters-top-k", "double-p", "error-target"}) {
    EXPECT_EQ(owner(Args(shape_, PolicyOf(preset))), "cuda") << preset;
  }
  for (const char* preset : {"quest", "double-sparsity", "twilight", "asynctls", "snapkv"}) {
    EXPECT_EQ(owner(Args(shape_, PolicyOf(preset))), "cpu") << preset;
  }
  EXPECT_EQ(owner(Args(MakeShape(2, 4, 2, 128, 128, DType::kFp32))), "cpu");
  EXPECT_EQ(owner(Args(MakeShape(2, 4, 2, 32, 32, DType::kBf16))), "cpu");
  EXPECT_EQ(owner(Args(MakeShape(2, 128, 2, 128, 128, DType::kBf16))), "cpu");
  EXPECT_EQ(owner(Args(MakeLatentShape(2, 4, 128, 128, DType::kBf16))), "cpu");
  EXPECT_EQ(owner(Args(shape_, std::nullopt, IndexSet())), "cpu") << "token order";
  EXPECT_EQ(owner(Args(shape_, PolicyOf("error-target"), attention::kRegressionIndexes)), "cpu");
  using attention::kTreeIndexes;
  for (const char* preset : {"dense", "streaming", "error-target", "clusters-top-k", "double-p"}) {
    EXPECT_EQ(owner(Args(shape_, PolicyOf(preset), kTreeIndexes)), "cuda") << preset;
  }
  EXPECT_EQ(owner(Args(shape_, PolicyOf("error-target", {{"quantile", "0.95"}}), kTreeIndexes)),
            "cuda");
  EXPECT_EQ(
      owner(Args(shape_, PolicyOf("error-target"), IndexSet{IndexKind::kTree, IndexKind::kLabels})),
      "cpu");
  EXPECT_EQ(owner(Args(shape_, std::nullopt, IndexSet{IndexKind::kClusters, IndexKind::kKeys4})),
            "cpu");
  // Trees are the device's if their groups have 64 tokens, whether or not the index is named.
  for (const auto& [sizes, backend] : {std::pair{attention::TreeSizes{12, 8, 3}, "cuda"},
                                       std::pair{attention::TreeSizes{8, 16, 3}, "cuda"},
                                       std::pair{attention::TreeSizes{16, 4, 3}, "cuda"},
                                       std::pair{attention::TreeSizes{8, 8, 2}, "cuda"},
                                       std::pair{attention::TreeSizes{8, 4, 3}, "cpu"},
                                       std::pair{attention::TreeSizes{12, 4, 2}, "cpu"}}) {
    SCOPED_TRACE(testing::Message() << sizes.leaf_tokens << " " << sizes.fan);
    const attention::IndexSet indexes = attnd::test::TreeOf(sizes);
    EXPECT_EQ(owner(Args(shape_, PolicyOf("error-target"), indexes)), backend);
    EXPECT_EQ(owner(Args(shape_, PolicyOf("error-target", {{"quantile", "0.95"}}), indexes)),
              backend);
    OpenArgs args = Args(shape_, PolicyOf("error-target"));
    args.tree = sizes;
    EXPECT_EQ(owner(args), backend);
  }
}

// error-target's index is a tree, whoever answers.
TEST_F(AutoEngine, DefaultIndexesAreTheOwners) {
  const attention::Policy policy = PolicyOf("error-target");
  EXPECT_EQ(engine_->IndexesOf(policy), attention::kTreeIndexes);
  EXPECT_EQ(Open(Args(shape_, policy)).Info().args.indexes, attention::kTreeIndexes);
  EXPECT_EQ(OwnerOf(Open(Args(shape_, policy))), "cuda");
  const ModelShape fp32 = MakeShape(2, 4, 2, 128, 128, DType::kFp32);
  EXPECT_EQ(Open(Args(fp32, policy)).Info().args.indexes, attention::kTreeIndexes);
}

TEST_F(AutoEngine, RowsOfBothInOneMessageAreWhatTheyAreAlone) {
  struct Case {
    OpenArgs args;
    bool on_device;
  };
  std::vector<Case> cases = {
      {Args(shape_), true},
      {Args(MakeShape(2, 4, 2, 128, 128, DType::kFp32)), false},
      {Args(shape_, PolicyOf("double-p")), true},
      {Args(MakeLatentShape(2, 4, 128, 128, DType::kBf16)), false},
      {Args(shape_, PolicyOf("quest", {{"budget", "64"}})), false},
      {Args(shape_, PolicyOf("error-target"), attention::kRegressionIndexes), false},
      {Args(shape_, PolicyOf("error-target"), attention::kTreeIndexes), true},
      {Args(shape_, PolicyOf("double-p"), attention::kTreeIndexes), true},
  };
  std::vector<TestSequence> sequences;
  for (const Case& c : cases) sequences.push_back(OpenFilled(c.args, 700));
  std::vector<Row> rows;
  for (TestSequence& sequence : sequences) rows.push_back(QueryOnlyRow(&sequence, 1, 2, &random_));
  const Message message(1, rows);
  const Answer together = engine::test::Send(engine_.get(), message);
  for (size_t i = 0; i < rows.size(); ++i) {
    SCOPED_TRACE(testing::Message() << "row " << i);
    ASSERT_TRUE(together.row_status(i).ok()) << together.row_status(i);
    EXPECT_EQ(ReadByDevice(together, i), cases[i].on_device);
    if (!cases[i].args.policy.has_value()) {
      EXPECT_TRUE(IsDense(message, together, i));
    }
    const Message alone(1, {rows[i]});
    EXPECT_EQ(AnswerOf(alone, engine::test::Send(engine_.get(), alone), 0),
              AnswerOf(message, together, i));
  }
  EXPECT_EQ(engine_->backend().stats().fallback_steps, 0u);
}

// Rows that append: a sequence on the device, two of the CPU's, and a shape of its own.
TEST_F(AutoEngine, BothDecodeInOneBatch) {
  std::vector<TestSequence> sequences;
  sequences.push_back(OpenFilled(Args(shape_), 700));
  sequences.push_back(OpenFilled(Args(shape_, std::nullopt, IndexSet()), 700));
  sequences.push_back(OpenFilled(Args(shape_, std::nullopt, attention::kRegressionIndexes), 700));
  for (int step = 0; step < 3; ++step) {
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      std::vector<Row> rows;
      for (TestSequence& sequence : sequences) {
        rows.push_back(NextRow(&sequence, layer, 1, &random_));
      }
      const Message message(layer, rows);
      const Answer answer = engine::test::Send(engine_.get(), message);
      for (size_t i = 0; i < rows.size(); ++i) {
        EXPECT_TRUE(IsDense(message, answer, i)) << answer.row_status(i);
        EXPECT_EQ(ReadByDevice(answer, i), i == 0);
      }
    }
  }
  TestSequence small = OpenFilled(Args(MakeShape(2, 4, 2, 32, 32, DType::kBf16)), 700);
  Generate(&small, 3, &random_, /*check=*/true);
  EXPECT_TRUE(MatchesModel(&small, &random_));
}

TEST_F(AutoEngine, TheOwnerBuildsAndForksHaveTheSame) {
  TestSequence gpu = OpenFilled(Args(shape_), 700);
  EXPECT_EQ(control_->builds(), shape_.layers);
  TestSequence cpu = OpenFilled(Args(shape_, std::nullopt, attention::kRegressionIndexes), 700);
  EXPECT_EQ(cpu.Info().segmented_tokens, 512u);
  EXPECT_EQ(control_->builds(), shape_.layers) << "the device builds no regression";
  for (TestSequence* parent : {&gpu, &cpu}) {
    const auto info = engine_->Fork(kTenant, parent->id, std::nullopt);
    ASSERT_TRUE(info.ok()) << info.status();
    TestSequence fork(engine_.get(), info->id, shape_);
    fork.writer = parent->writer + 1;
    fork.history = parent->history;
    EXPECT_EQ(OwnerOf(fork), OwnerOf(*parent));
    Generate(&fork, 2, &random_, /*check=*/true);
    EXPECT_TRUE(AnswersDense(parent, &random_));
  }
}

// A policy that reads what the sequence has, and that the device has no kernels for.
TEST_F(AutoEngine, ARowMayAskForAPolicyThatTheDeviceLacks) {
  TestSequence sequence = OpenFilled(Args(shape_), 700);
  Row row = QueryOnlyRow(&sequence, 0, 1, &random_);
  row.policy = PolicyOf("topk-completion", {{"completion", "off"}, {"budget", "100%"}});
  row.policy->window = 0;
  const Message message(0, {row});
  const Answer answer = engine::test::Send(engine_.get(), message);
  ASSERT_TRUE(answer.row_status(0).ok()) << answer.row_status(0);
  EXPECT_FALSE(ReadByDevice(answer, 0));
  EXPECT_TRUE(IsDense(message, answer, 0));
  EXPECT_EQ(OwnerOf(sequence), "cuda");
}

TEST_F(AutoEngine, RowsOfADevicesTreeAreItsOwn) {
  TestSequence sequence =
      OpenFilled(Args(shape_, PolicyOf("error-target"), attention::kTreeIndexes), 2700);
  EXPECT_EQ(OwnerOf(sequence), "cuda");
  for (const attention::Policy& policy :
       {PolicyOf("error-target"), PolicyOf("double-p"), PolicyOf("clusters-top-k"),
        PolicyOf("error-target", {{"quantile", "0.95"}}),
        PolicyOf("error-target", {{"tolerance", "off"}}), PolicyOf("dense")}) {
    SCOPED_TRACE(attention::test::Describe(policy));
    Row row = QueryOnlyRow(&sequence, 1, 2, &random_);
    row.policy = policy;
    const Message message(1, {row});
    const Answer answer = engine::test::Send(engine_.get(), message);
    ASSERT_TRUE(answer.row_status(0).ok()) << answer.row_status(0);
    EXPECT_TRUE(ReadByDevice(answer, 0));
    if (policy.preset == "dense") {
      EXPECT_TRUE(IsDense(message, answer, 0));
    }
  }
  EXPECT_EQ(engine_->backend().stats().fallback_steps, 0u);
}

// What is resumed of the device's sequences is whole, of the CPU's paged; new sequences that begin
// with the same prompt are of their own owners.
TEST_F(AutoEngine, WhatIsResumedOrBegunWithHasItsOwner) {
  Start(/*disk=*/true);
  std::vector<uint32_t> ids(700);
  std::iota(ids.begin(), ids.end(), 1);
  struct Case {
    OpenArgs args;
    std::string owner;
    uint64_t sealed_id = 0;
    std::optional<TestSequence> sequence = std::nullopt;
  };
  std::vector<Case> cases = {
      {Args(shape_), "cuda"},
      {Args(shape_, std::nullopt, attention::kRegressionIndexes), "cpu"},
      {Args(shape_, std::nullopt, attnd::test::TreeOf({8, 16, 3})), "cuda"},
      {Args(shape_, std::nullopt, attnd::test::TreeOf({8, 4, 3})), "cpu"},
      {Args(shape_, std::nullopt, IndexSet()), "cpu"},
  };
  for (Case& c : cases) {
    TestSequence& sequence = c.sequence.emplace(Open(c.args));
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      const engine::test::Kv kv = engine::test::RandomKv(shape_, ids.size(), &random_);
      engine::AppendChunk chunk = engine::test::ChunkOf(layer, 0, kv);
      if (layer == 0) chunk.token_ids = ids;
      ASSERT_TRUE(engine_->Append(kTenant, sequence.writer, sequence.id, chunk).ok());
      sequence.history.Append(layer, kv);
    }
    FinishPrefill(&sequence);
    const auto sealed = engine_->Seal(kTenant, sequence.id, nullptr);
    ASSERT_TRUE(sealed.ok()) << sealed.status();
    c.sealed_id = sealed->sealed_id;
  }
  Start(/*disk=*/true);
  for (Case& c : cases) {
    OpenArgs any = c.args;
    any.indexes = std::nullopt;  // what was sealed says it
    const auto resumed = engine_->Resume(kTenant, any, c.sealed_id, nullptr);
    ASSERT_TRUE(resumed.ok()) << resumed.status();
    EXPECT_EQ(resumed->backend, c.owner);
    const auto begun = engine_->OpenReusing(kTenant, c.args, ids, nullptr);
    ASSERT_TRUE(begun.ok()) << begun.status();
    EXPECT_EQ(begun->tokens_present, 512u);
    EXPECT_EQ(begun->backend, c.owner);
    TestSequence back(engine_.get(), resumed->sequence_id, shape_);
    back.history = c.sequence->history;
    const Message message(0, {QueryOnlyRow(&back, 0, 1, &random_)});
    const Answer answer = engine::test::Send(engine_.get(), message);
    EXPECT_TRUE(IsDense(message, answer, 0)) << answer.row_status(0);
    EXPECT_EQ(ReadByDevice(answer, 0), c.owner == "cuda");
    EXPECT_EQ(answer.result.rows[0].stats.ssd_tokens > 0, c.owner == "cpu");
  }
}

// What the device has grows beyond the host's memory: segments go to files, rows that would read
// them are the CPU's, and other rows of the message stay the device's.
TEST_F(AutoEngine, ADevicesSequenceMayOutgrowHostMemory) {
  constexpr uint64_t kMib = uint64_t{1} << 20, kTokens = 7000;
  const ModelShape shape = MakeShape(1, 4, 2, 128, 128, DType::kBf16);
  // The keys and values alone have 7.
  Start(/*disk=*/true, SmallOptions(), /*maps_host_memory=*/false, 5 * kMib);
  TestSequence small = OpenFilled(Args(shape, PolicyOf("error-target")), 100);
  TestSequence large = Open(Args(shape, PolicyOf("error-target"), attention::kClusterIndexes));
  for (uint64_t done = 0; done < kTokens; done += 250) {
    const engine::test::Kv kv = engine::test::RandomKv(shape, 250, &random_);
    engine::AppendChunk chunk = engine::test::ChunkOf(/*layer=*/0, done, kv);
    chunk.may_wait = true;
    const absl::Status status = engine_->Append(kTenant, large.writer, large.id, chunk);
    ASSERT_TRUE(status.ok()) << done << ": " << status;
    large.history.Append(0, kv);
  }
  FinishPrefill(&large);
  EXPECT_EQ(OwnerOf(large), "cuda");
  EXPECT_GT(engine_->archive_stats().paged_out_segments, 3u);
  Generate(&large, 3, &random_);
  const Message message(
      0, {QueryOnlyRow(&large, 0, 1, &random_), QueryOnlyRow(&small, 0, 1, &random_)});
  const Answer answer = engine::test::Send(engine_.get(), message);
  ASSERT_TRUE(answer.row_status(0).ok()) << answer.row_status(0);
  EXPECT_FALSE(ReadByDevice(answer, 0));
  EXPECT_GT(answer.result.rows[0].stats.ssd_tokens, 0u);
  EXPECT_TRUE(ReadByDevice(answer, 1));
  EXPECT_TRUE(MatchesModel(&large, &random_));
  EXPECT_TRUE(engine_->backend().Health().ok());
}

// Prompts and resumed sequences, once the page memory is a cache.
TEST_F(AutoEngine, WhatIsReadInPlaceIsMappedBeforeAStep) {
  Start(/*disk=*/true, OfPages(uint64_t{2} << 20), /*maps_host_memory=*/true);
  const auto payload = [&](const TestSequence& sequence) {
    return sequence.Info().segmented_tokens * shape_.layers * shape_.kv_heads *
           shape_.token_bytes();
  };
  TestSequence first = OpenFilled(Args(shape_), 1300);
  const auto sealed = engine_->Seal(kTenant, first.id, nullptr);
  ASSERT_TRUE(sealed.ok()) << sealed.status();
  EXPECT_EQ(control_->mapped_bytes(), 0u) << "all may fit yet";
  Generate(&first, 3, &random_);  // a first cache makes room for the tail
  ASSERT_GT(engine_->backend().stats().cache.bytes, 0u);
  const TestSequence second = OpenFilled(Args(shape_), 1300);
  Await([&] { return control_->mapped_bytes() >= payload(first) + payload(second); });
  ASSERT_TRUE(engine_->Close(kTenant, first.id).ok());
  const auto resumed = engine_->Resume(kTenant, Args(shape_), sealed->sealed_id, nullptr);
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  const TestSequence back(engine_.get(), resumed->sequence_id, shape_);
  Await([&] { return control_->mapped_bytes() >= payload(back) + payload(second); });
}

TEST_F(AutoEngine, ADeviceThatFailsLosesNothing) {
  TestSequence gpu = OpenFilled(Args(shape_), 700);
  TestSequence cpu = OpenFilled(Args(shape_, std::nullopt, IndexSet()), 700);
  control_->Set({.call = 0});
  const Message message(0,
                        {QueryOnlyRow(&gpu, 0, 1, &random_), QueryOnlyRow(&cpu, 0, 1, &random_)});
  const Answer answer = engine::test::Send(engine_.get(), message);
  for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(IsDense(message, answer, i)) << answer.row_status(i);
  EXPECT_FALSE(engine_->backend().Health().ok());
  EXPECT_EQ(engine_->backend().stats().fallback_steps, 1u) << "the CPU's own rows are no fallback";
}

// Plans of both parts in the order of the request's rows.
TEST(AutoBackendTest, PlansHaveTheRequestsNumbers) {
  FakePair fake = MakeFakeDevice(uint64_t{1} << 30);
  const std::shared_ptr<attention::Backend> cpu = MakeCpu();
  auto cuda = MakeCudaBackend(SmallOptions(), std::move(fake.device), cpu);
  ASSERT_TRUE(cuda.ok()) << cuda.status();
  attention::Backend* const device = cuda->get();
  const auto both = MakeAutoBackend(*std::move(cuda), cpu);
  const ParityCase c = {4, 2, 64, 64, {512}, 40};
  std::vector<attention::test::TestSequence> sequences;
  for (const attention::Backend* owner : {device, cpu.get()}) {
    sequences.push_back(attention::test::MakeSequence(SpecOf(c, DType::kBf16)));
    auto view = std::make_shared<attention::SequenceView>(*sequences.back().view);
    view->owner = owner;
    sequences.back().view = std::move(view);
  }
  std::vector<attention::test::TestRow> rows;
  for (uint32_t i = 0; i < 6; ++i) {
    rows.push_back(attention::test::MakeRow(&sequences[i % 2], Parse("double-p"), 552, 1, true,
                                            DType::kFp32, 0, i));
  }
  const attention::test::StepResult step = attention::test::RunStep(both.get(), 0, rows);
  ASSERT_TRUE(step.status.ok()) << step.status;
  ASSERT_EQ(step.plans.size(), 12u);
  for (uint32_t i = 0; i < 12; ++i) {
    EXPECT_EQ(step.plans[i].row, i / 2);
    EXPECT_EQ(step.plans[i].kv_head, i % 2);
  }
  for (uint32_t i = 0; i < 6; ++i) EXPECT_EQ(step.rows[i].stats.hbm_tokens > 0, i % 2 == 0);
}

}  // namespace
}  // namespace attnd::gpu::test
