// SPDX-License-Identifier: Apache-2.0
//
// Goal: files of label channels are read as they were written, wrong ones are refused by name, and
// labels of a model's sequences are made of its file's channels, all of a sequence's of the same.
// Method: random channels there and back; good files with one thing wrong, and damage; engines with
// and without files over one data folder, with a backend that shows the segments that a step reads.
#include "engine/models/label_channel_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "attention/cpu/cpu_backend.h"
#include "common/safetensors.h"
#include "engine/archive/chain.h"
#include "engine/engine.h"
#include "engine/models/safetensors_file.h"
#include "tests/engine/forwarding_backend.h"
#include "tests/engine/support.h"
#include "tests/temporary_folder.h"

namespace attnd::engine::test {
namespace {

using attention::IndexKind;
using attention::IndexSet;
using attnd::test::TemporaryFolder;
using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using testing::Not;

constexpr uint32_t kChannels = 16;  // of a head_dim of 64
constexpr uint64_t kPrompt = 1300;  // two segments and a window

// The channels of all heads, one after another.
using Channels = std::vector<uint16_t>;

// A file in parts, so that each can be spoilt.
struct Content {
  SafetensorsHead head;
  std::vector<int64_t> channels;

  TensorEntry& tensor() { return head.tensors["channels"]; }
  std::string Bytes() const {
    return EncodeHead(head).value() + std::string(reinterpret_cast<const char*>(channels.data()),
                                                  channels.size() * sizeof(channels[0]));
  }
};

Content ContentOf(const Channels& channels, uint64_t layers = 2, uint64_t kv_heads = 2,
                  uint64_t head_dim = 64) {
  Content content;
  content.channels.assign(channels.begin(), channels.end());
  TensorEntry& entry = content.tensor();
  entry.dtype = "I64";
  entry.shape = {layers, kv_heads, channels.size() / (layers * kv_heads)};
  entry.end = channels.size() * sizeof(int64_t);
  content.head.metadata = {{"format", kLabelChannelFormat},
                           {"fingerprint", "test"},  // of ArgsOf
                           {"head_dim", std::to_string(head_dim)}};
  return content;
}

Channels RandomChannels(Random* random, size_t heads = 4, size_t count = kChannels,
                        uint16_t head_dim = 64) {
  Channels channels;
  std::vector<uint16_t> all(head_dim);
  for (size_t head = 0; head < heads; ++head) {
    std::iota(all.begin(), all.end(), uint16_t{0});
    std::shuffle(all.begin(), all.end(), random->generator());
    std::sort(all.begin(), all.begin() + static_cast<ptrdiff_t>(count));
    channels.insert(channels.end(), all.begin(), all.begin() + static_cast<ptrdiff_t>(count));
  }
  return channels;
}

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

class LabelChannelFilesTest : public testing::Test {
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

TEST_F(LabelChannelFilesTest, AreReadAsTheyWereWritten) {
  const Channels channels = RandomChannels(&random_, 6, 5, 80);
  const auto file = DecodeLabelChannels(ContentOf(channels, 3, 2, 80).Bytes());
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->fingerprint, "test");
  const ModelLabelChannels& model = *file->model;
  EXPECT_EQ(model.choice->channels, channels);
  EXPECT_TRUE(model.choice->query_magnitudes.empty());
  EXPECT_EQ(std::vector<uint32_t>({model.layers, model.kv_heads, model.head_dim, model.channels}),
            std::vector<uint32_t>({3, 2, 80, 5}));
  EXPECT_EQ(model.identity.size(), 32u);
  const auto other =
      DecodeLabelChannels(ContentOf(RandomChannels(&random_, 6, 5, 80), 3, 2, 80).Bytes());
  ASSERT_TRUE(other.ok());
  EXPECT_NE(other->model->identity, model.identity);
}

TEST_F(LabelChannelFilesTest, WrongOnesAreRefusedByName) {
  const Content good = ContentOf(RandomChannels(&random_));
  ASSERT_TRUE(DecodeLabelChannels(good.Bytes()).ok());
  const auto head_dim = [](const char* text) {
    return [text](Content* c) { c->head.metadata["head_dim"] = text; };
  };
  const auto shape = [](std::vector<uint64_t> extents) {
    return [extents](Content* c) {
      uint64_t elements = 1;
      for (const uint64_t extent : extents) elements *= extent;
      c->tensor().shape = extents;
      c->tensor().end = elements * sizeof(int64_t);
      c->channels.resize(elements);
    };
  };
  const struct {
    const char* named;
    const char* allowed;
    std::function<void(Content*)> spoil;
  } kCases[] = {
      {"metadata format", kLabelChannelFormat,
       [](Content* c) { c->head.metadata["format"] = "attnd.feature_maps.1"; }},
      {"metadata format", "missing", [](Content* c) { c->head.metadata.erase("format"); }},
      {"metadata fingerprint", "missing",
       [](Content* c) { c->head.metadata["fingerprint"].clear(); }},
      {"metadata head_dim", "missing", [](Content* c) { c->head.metadata.erase("head_dim"); }},
      {"metadata head_dim", "1..576", head_dim("0")},
      {"metadata head_dim", "1..576", head_dim("577")},
      {"metadata head_dim", "1..576", head_dim("-64")},
      {"metadata head_dim", "1..576", head_dim("64 channels")},
      {"channels", "below head_dim 32", head_dim("32")},  // some are beyond it
      {"channels", "missing",
       [](Content* c) {
         c->head.tensors["channel"] = c->head.tensors.extract("channels").mapped();
       }},
      {"channels", "I64", [](Content* c) { c->tensor().dtype = "I32"; }},
      {"channels", "3 extents", shape({4, 16})},
      {"channels", "1..1024", shape({0, 2, 16})},
      {"channels", "1..1024", shape({2, 0, 16})},
      {"channels", "1..1024", shape({1025, 1, 1})},
      {"channels", "1..1024", shape({1, 1025, 1})},
      {"channels", "1..64", shape({2, 2, 0})},
      {"channels", "1..64", shape({1, 1, 65})},
      {"channels", "bytes",
       [](Content* c) {
         c->tensor().shape = {1u << 31, 1u << 31, 1u << 31};
       }},
      {"channels has 7 behind 7", "ascending",
       [](Content* c) { c->channels[16] = c->channels[17] = 7; }},
      {"channels", "ascending", [](Content* c) { std::swap(c->channels[3], c->channels[4]); }},
      {"channels", "below head_dim", [](Content* c) { c->channels[15] = 64; }},
      {"channels", "ascending", [](Content* c) { c->channels[0] = -1; }},
      {"channels", "below head_dim", [](Content* c) { c->channels[63] = int64_t{1} << 62; }},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(testing::Message() << c.named << ", " << c.allowed);
    Content content = good;
    c.spoil(&content);
    const absl::Status status = DecodeLabelChannels(content.Bytes()).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(c.named), HasSubstr(c.allowed)));
  }
}

// Nothing is read beyond the file, whatever it says; under the address sanitizer above all.
TEST_F(LabelChannelFilesTest, DamageIsRefusedOrHarmless) {
  const std::string good = ContentOf(RandomChannels(&random_)).Bytes();
  for (size_t size = 0; size < good.size(); ++size) {
    // A copy of its own, so that reading on is seen.
    const std::string cut(good, 0, size);
    EXPECT_TRUE(absl::IsInvalidArgument(DecodeLabelChannels(cut).status())) << size;
  }
  const size_t head = 8 + DecodeHeadLength(good, good.size()).value();
  for (int i = 0; i < 2000; ++i) {
    std::string bytes = good;
    bytes[random_.Below(i % 2 == 0 ? head : bytes.size())] = static_cast<char>(random_.Below(256));
    const auto file = DecodeLabelChannels(bytes);
    EXPECT_TRUE(file.ok() || absl::IsInvalidArgument(file.status())) << file.status();
    if (!file.ok()) continue;
    const ModelLabelChannels& model = *file->model;
    ASSERT_EQ(model.choice->channels.size(),
              size_t{model.layers} * model.kv_heads * model.channels);
    EXPECT_THAT(model.choice->channels, Each(testing::Lt(model.head_dim)));
  }
}

TEST_F(LabelChannelFilesTest, AServerHasOneFileForAModel) {
  Content content = ContentOf(RandomChannels(&random_));
  const std::string good = Write("good", content.Bytes());
  const std::string large = Write("large", content.Bytes());
  std::filesystem::resize_file(large, kLabelChannelFileBytesMax + 1);
  content.head.metadata["fingerprint"] = "another";
  const std::string another = Write("another", content.Bytes());
  const auto store = LabelChannelStore::Load({good, another});
  ASSERT_TRUE(store.ok()) << store.status();
  EXPECT_NE(store->Of("test"), nullptr);
  EXPECT_NE(store->Of("another"), nullptr);
  EXPECT_EQ(store->Of("a third"), nullptr);
  EXPECT_EQ(store->Of(""), nullptr);
  EXPECT_TRUE(LabelChannelStore::Load({}).ok());
  const struct {
    std::vector<std::string> paths;
    const char* why;
  } kCases[] = {
      {{good, Write("twin", RandomChannels(&random_))}, "same model"},
      {{folder_.Path("missing")}, "No such file"},
      {{folder_.path()}, ""},
      {{Write("empty", "")}, ""},
      {{Write("short", content.Bytes().substr(0, 100))}, ""},
      {{large}, "allowed are 67108864"},
  };
  for (const auto& c : kCases) {
    const absl::Status status = LabelChannelStore::Load(c.paths).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("label_channels " + c.paths.back() + ": "), HasSubstr(c.why)));
    EngineOptions options = SmallOptions();
    options.label_channels = c.paths;
    EXPECT_EQ(Engine::Create(options, attention::MakeCpuBackend({}), nullptr).status(), status);
  }
  const absl::Status many =
      LabelChannelStore::Load(std::vector<std::string>(kModelFilesMax + 1, good)).status();
  EXPECT_THAT(std::string(many.message()), HasSubstr("label_channels has 65 files"));
}

TEST_F(LabelChannelFilesTest, LabelsAreOfTheFilesChannels) {
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
TEST_F(LabelChannelFilesTest, OtherModelsChooseByThemselves) {
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

TEST_F(LabelChannelFilesTest, ASequenceKeepsTheChannelsOfItsFirstSegment) {
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

// What a sequence brought from disk is shared with its channels; what was sealed with others than
// the server's is not looked for, as a seal would take the one for the other.
TEST_F(LabelChannelFilesTest, PrefixesKeepTheirChannels) {
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
TEST_F(LabelChannelFilesTest, ASealNeverMixesChannels) {
  for (const bool close : {false, true}) {
    SCOPED_TRACE(testing::Message() << "close " << close);
    CheckSealsOfEqualTokens(close);
  }
}

// Three sequences of the same tokens, the last two with observed queries of their own; whether each
// is closed when it has been sealed. Resumed, each has the channels that its first segment had.
void LabelChannelFilesTest::CheckSealsOfEqualTokens(bool close) {
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

TEST_F(LabelChannelFilesTest, SegmentsOfOtherChannelsHaveOtherNames) {
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

TEST_F(LabelChannelFilesTest, AFileOfAnotherShapeIsRefused) {
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
TEST_F(LabelChannelFilesTest, LatentModelsHave128) {
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
