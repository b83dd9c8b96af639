// SPDX-License-Identifier: Apache-2.0
//
// Goal: labels of a model's sequences are made of its file's channels, all of a sequence's of the
// same. Method: engines with and without files over one data folder, with a backend that shows the
// segments that a step reads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/archive/chain.h"
#include "engine/engine.h"
#include "tests/engine/forwarding_backend.h"
#include "tests/engine/models/label_channel_content.h"
#include "tests/engine/support.h"
#include "tests/temporary_folder.h"

namespace attnd::engine::test {
namespace {

using attention::IndexKind;
using attnd::test::TemporaryFolder;
using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using testing::Not;

constexpr uint64_t kPrompt = 1300;  // two segments and a window

// The CPU's, and the view of the last step's last row.
class ShowingBackend : public ForwardingBackend {
 public:
  explicit ShowingBackend(std::shared_ptr<const attention::SequenceView>* seen) : seen_(seen) {}
  absl::Status Step(const attention::StepRequest& request) override {
    *seen_ = request.rows.back().view;
    return ForwardingBackend::Step(request);
  }

 private:
  std::shared_ptr<const attention::SequenceView>* const seen_;
};

class LabelChannelSequencesTest : public testing::Test {
 protected:
  std::string Write(const std::string& name, const std::string& bytes) const {
    const std::string path = folder_.Path(name);
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }
  std::string Write(const std::string& name, const Channels& channels) const {
    return Write(name, ContentOf(channels).Bytes());
  }
  // In place of the engine before, over the same data folder.
  void Start(const std::vector<std::string>& files) {
    seen_.reset();
    engine_.reset();
    EngineOptions options = SmallOptions();
    options.label_channels = files;
    options.archive.data_dir = folder_.Path("data");
    options.archive.page_memory_bytes = uint64_t{1} << 20;
    auto engine = Engine::Create(options, std::make_unique<ShowingBackend>(&seen_), nullptr);
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
  }
  OpenArgs Args(const std::string& fingerprint = "test",
                const char* preset = "double-sparsity") const {
    OpenArgs args = ArgsOf(shape_, PolicyOf(preset));
    args.fingerprint = fingerprint;
    return args;
  }
  TestSequence Opened(const OpenArgs& args) {
    return TestSequence(engine_.get(), engine_->Open(kTenant, args).value(), shape_);
  }
  TestSequence Prompt(const OpenArgs& args) {
    TestSequence sequence = Opened(args);
    Prefill(&sequence, kPrompt, &random_);
    FinishPrefill(&sequence);
    return sequence;
  }
  TestSequence Resumed(uint64_t sealed_id, const History& history) {
    const auto opened = engine_->Resume(kTenant, ArgsOf(shape_), sealed_id, nullptr);
    EXPECT_TRUE(opened.ok()) << opened.status();
    TestSequence sequence(engine_.get(), opened->sequence_id, shape_);
    sequence.history = history;
    return sequence;
  }
  // Another segment, in the background if its tokens are generated.
  void Grow(TestSequence* sequence, bool generated = false) {
    const uint32_t before = sequence->Info().segments;
    if (generated) {
      Generate(sequence, 600, &random_);
      engine_->WaitForBackground();
    } else {
      Prefill(sequence, 600, &random_);
      FinishPrefill(sequence);
    }
    ASSERT_GT(sequence->Info().segments, before);
  }
  // What labels of each segment are made of.
  std::vector<Channels> ChannelsOf(TestSequence* sequence) {
    const Message message(0, {QueryOnlyRow(sequence, 0, 1, &random_)});
    EXPECT_TRUE(Send(engine_.get(), message).row_status(0).ok());
    std::vector<Channels> all;
    for (const auto& segment : seen_->segments) {
      all.push_back(attention::LabelChoiceOf(*segment)->channels);
    }
    EXPECT_EQ(all.size(), sequence->Info().segments);
    return all;
  }
  void CheckSealsOfEqualTokens(bool close);
  absl::Status Observe(const TestSequence& sequence) {
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      const Numbers queries =
          RandomNumbers(DType::kFp32, 8 * shape_.query_heads * shape_.head_dim, &random_);
      const absl::Status status =
          engine_->Observe(kTenant, kWriter, sequence.id,
                           {layer, 8, shape_.query_heads, shape_.head_dim, queries.view()});
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  const ModelShape shape_ = MakeShape(2, 4, 2, 64, 64, DType::kBf16);
  const uint64_t seed_ = TestSeed();
  const testing::ScopedTrace trace_{__FILE__, __LINE__, testing::Message() << "seed " << seed_};
  Random random_{seed_};
  const TemporaryFolder folder_;
  std::unique_ptr<Engine> engine_;
  std::shared_ptr<const attention::SequenceView> seen_;  // goes before the engine, whose it is
};

TEST_F(LabelChannelSequencesTest, LabelsAreOfTheFilesChannels) {
  const Channels channels = RandomChannels(&random_);
  Start({Write("file", channels)});
  for (const char* preset : {"double-sparsity", "asynctls"}) {
    TestSequence sequence = Opened(Args("test", preset));
    ASSERT_TRUE(Observe(sequence).ok());  // which would choose others
    Prefill(&sequence, kPrompt, &random_);
    FinishPrefill(&sequence);
    EXPECT_GE(ChannelsOf(&sequence).size(), 2u);
    Grow(&sequence, /*generated=*/preset == std::string("asynctls"));
    EXPECT_THAT(ChannelsOf(&sequence), Each(channels)) << preset;
    // A fork, and what is left after every segment went, keep them.
    const auto fork = engine_->Fork(kTenant, sequence.id, 100);
    ASSERT_TRUE(fork.ok());
    TestSequence child(engine_.get(), fork->id, shape_);
    child.history = sequence.history;
    child.history.Truncate(100);
    ASSERT_TRUE(engine_->Truncate(kTenant, sequence.id, 100).ok());
    sequence.history.Truncate(100);
    for (TestSequence* const short_one : {&child, &sequence}) {
      EXPECT_EQ(ChannelsOf(short_one).size(), 0u);
      Prefill(short_one, kPrompt, &random_);
      FinishPrefill(short_one);
      EXPECT_GE(ChannelsOf(short_one).size(), 1u);
      EXPECT_THAT(ChannelsOf(short_one), Each(channels)) << preset;
    }
  }
}

// As before there were files.
TEST_F(LabelChannelSequencesTest, OtherModelsChooseByThemselves) {
  const Channels channels = RandomChannels(&random_);
  Start({Write("file", channels)});
  for (const char* fingerprint : {"another", ""}) {
    TestSequence sequence = Prompt(Args(fingerprint));
    const auto chosen = ChannelsOf(&sequence);
    ASSERT_GE(chosen.size(), 2u);
    EXPECT_NE(chosen.front(), channels);
    EXPECT_THAT(chosen, Each(chosen.front()));
  }
}

TEST_F(LabelChannelSequencesTest, ASequenceKeepsTheChannelsOfItsFirstSegment) {
  const Channels channels = RandomChannels(&random_);
  const std::string file = Write("file", channels);
  const std::vector<std::vector<std::string>> starts = {
      {}, {file}, {Write("other", RandomChannels(&random_))}};
  for (const auto& before : starts) {
    Start(before);
    TestSequence sequence = Prompt(Args());
    const Channels first = ChannelsOf(&sequence).front();
    EXPECT_EQ(first == channels, before == starts[1]);
    const auto sealed = engine_->Seal(kTenant, sequence.id, nullptr);
    ASSERT_TRUE(sealed.ok()) << sealed.status();
    const History history = sequence.history;
    for (const auto& after : starts) {
      Start(after);
      TestSequence resumed = Resumed(sealed->sealed_id, history);
      EXPECT_TRUE(engine_->MayReadDisk(kTenant, resumed.id));
      Grow(&resumed);
      EXPECT_GE(ChannelsOf(&resumed).size(), 3u);
      EXPECT_THAT(ChannelsOf(&resumed), Each(first));
      EXPECT_TRUE(AnswersDense(&resumed, &random_));
    }
  }
}

// What a sequence read from disk is shared with its channels; what was sealed with others than
// the server's is not looked for, as a seal would take the one for the other.
TEST_F(LabelChannelSequencesTest, PrefixesKeepTheirChannels) {
  const Channels channels = RandomChannels(&random_);
  const std::string file = Write("file", channels);
  std::vector<uint32_t> ids(kPrompt);
  for (uint32_t& id : ids) id = static_cast<uint32_t>(random_.Below(50000));
  Start({});
  TestSequence sequence = Opened(Args());
  for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
    const Kv kv = RandomKv(shape_, kPrompt, &random_);
    AppendChunk chunk = ChunkOf(layer, 0, kv);
    chunk.token_ids = ids;
    ASSERT_TRUE(engine_->Append(kTenant, kWriter, sequence.id, chunk).ok());
    sequence.history.Append(layer, kv);
  }
  FinishPrefill(&sequence);
  const Channels own = ChannelsOf(&sequence).front();
  const auto sealed = engine_->Seal(kTenant, sequence.id, nullptr);
  ASSERT_TRUE(sealed.ok()) << sealed.status();
  const History history = sequence.history;
  const auto reusing = [&] {
    const auto opened = engine_->OpenReusing(kTenant, Args(), ids, nullptr);
    EXPECT_TRUE(opened.ok()) << opened.status();
    TestSequence fresh(engine_.get(), opened->sequence_id, shape_);
    fresh.history = history;
    fresh.history.Truncate(opened->tokens_present);
    return fresh;
  };

  Start({});
  TestSequence from_disk = reusing();
  EXPECT_GT(from_disk.Info().segments, 0u);
  EXPECT_THAT(ChannelsOf(&from_disk), Each(own));

  Start({file});
  EXPECT_EQ(reusing().Info().segments, 0u);
  const TestSequence resumed = Resumed(sealed->sealed_id, history);
  TestSequence from_memory = reusing();
  EXPECT_GT(from_memory.Info().segments, 0u);
  Grow(&from_memory);
  EXPECT_THAT(ChannelsOf(&from_memory), AllOf(Not(testing::IsEmpty()), Each(own)));
}

// A seal may take another sequence's segment for one of the same tokens, but not one whose labels
// are of other channels than those of the segments behind it.
TEST_F(LabelChannelSequencesTest, ASealNeverMixesChannels) {
  for (const bool close : {false, true}) {
    SCOPED_TRACE(testing::Message() << "close " << close);
    CheckSealsOfEqualTokens(close);
  }
}

// Three sequences of the same tokens, the last two with observed queries of their own; whether each
// is closed when it has been sealed. Resumed, each has the channels that its first segment had.
void LabelChannelSequencesTest::CheckSealsOfEqualTokens(bool close) {
  Start({});
  std::vector<uint32_t> ids(kPrompt);
  for (uint32_t& id : ids) id = static_cast<uint32_t>(random_.Below(50000));
  std::vector<Kv> layers;
  for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
    layers.push_back(RandomKv(shape_, kPrompt, &random_));
  }
  std::vector<uint64_t> sealed;
  std::vector<Channels> first;
  History history(shape_);
  for (const bool observed : {false, true, true}) {
    TestSequence sequence = Opened(Args());
    if (observed) {
      ASSERT_TRUE(Observe(sequence).ok());
    }
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      AppendChunk chunk = ChunkOf(layer, 0, layers[layer]);
      chunk.token_ids = ids;
      ASSERT_TRUE(engine_->Append(kTenant, kWriter, sequence.id, chunk).ok());
      sequence.history.Append(layer, layers[layer]);
    }
    FinishPrefill(&sequence);
    first.push_back(ChannelsOf(&sequence).front());
    const auto seal = engine_->Seal(kTenant, sequence.id, nullptr);
    ASSERT_TRUE(seal.ok()) << seal.status();
    sealed.push_back(seal->sealed_id);
    history = sequence.history;
    if (close) {
      ASSERT_TRUE(engine_->Close(kTenant, sequence.id).ok());
    }
  }
  ASSERT_NE(first[0], first[1]);
  for (size_t i = 0; i < sealed.size(); ++i) {
    Start({});
    TestSequence resumed = Resumed(sealed[i], history);
    EXPECT_GE(ChannelsOf(&resumed).size(), 2u);
    EXPECT_THAT(ChannelsOf(&resumed), Each(first[i]));
    EXPECT_TRUE(AnswersDense(&resumed, &random_));
  }
}

TEST_F(LabelChannelSequencesTest, SegmentsOfOtherChannelsHaveOtherNames) {
  OpenArgs args = Args();
  args.indexes = {IndexKind::kLabels};
  const std::vector<uint32_t> ids(512, 7);
  const auto name = [&](const std::string& identity) {
    args.model_parts.label_channels_id = identity;
    return ChainNames({}, kTenant, args).NameOf({kNoChain, 0, 4, ids}).value();
  };
  EXPECT_NE(name(""), name("one"));
  EXPECT_NE(name("one"), name("other"));
  EXPECT_EQ(name("one"), name("one"));
}

TEST_F(LabelChannelSequencesTest, AFileOfAnotherShapeIsRefused) {
  const Channels right = RandomChannels(&random_);
  Start({});
  TestSequence sequence = Prompt(Args());
  const uint64_t sealed_id = engine_->Seal(kTenant, sequence.id, nullptr).value().sealed_id;
  const struct {
    Content content;
    const char* named;
  } kCases[] = {
      {ContentOf(RandomChannels(&random_, 6), 3, 2), "of 3 layers, 2 KV heads and head_dim 64, 16"},
      {ContentOf(RandomChannels(&random_, 2), 2, 1), "of 2 layers, 1 KV heads and head_dim 64, 16"},
      {ContentOf(right, 2, 2, 80), "of 2 layers, 2 KV heads and head_dim 80, 16"},
      {ContentOf(RandomChannels(&random_, 4, 15)), "of 2 layers, 2 KV heads and head_dim 64, 15"},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.named);
    Start({Write("file", c.content.Bytes())});
    for (const absl::Status& status :
         {engine_->Open(kTenant, Args()).status(),
          engine_->OpenReusing(kTenant, Args(), {}, nullptr).status(),
          engine_->Resume(kTenant, ArgsOf(shape_), sealed_id, nullptr).status()}) {
      EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr(c.named),
                        HasSubstr("the model has 2, 2 and 64, and labels of 16 channels")));
    }
    // Who has no labels does not mind.
    EXPECT_TRUE(engine_->Open(kTenant, Args("test", "quest")).ok());
    EXPECT_TRUE(engine_->Open(kTenant, Args("another")).ok());
  }
}

// A latent head has labels of 128 channels, whatever its length.
TEST_F(LabelChannelSequencesTest, LatentModelsHave128) {
  const ModelShape latent = MakeLatentShape(1, 4, 576, 512, DType::kBf16);
  const Channels channels = RandomChannels(&random_, 1, 128, 576);
  Start({Write("file", ContentOf(channels, 1, 1, 576).Bytes())});
  OpenArgs args = ArgsOf(latent, PolicyOf("double-sparsity"));
  TestSequence sequence(engine_.get(), engine_->Open(kTenant, args).value(), latent);
  Prefill(&sequence, 700, &random_);
  FinishPrefill(&sequence);
  EXPECT_THAT(ChannelsOf(&sequence), AllOf(Not(testing::IsEmpty()), Each(channels)));
}

}  // namespace
}  // namespace attnd::engine::test
