// SPDX-License-Identifier: Apache-2.0
//
// Goal: files of label channels are read as they were written, and wrong ones are refused by name.
// Method: random channels there and back; good files with one thing wrong, and damage.
#include "engine/models/label_channel_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "attention/cpu/cpu_backend.h"
#include "common/safetensors.h"
#include "engine/engine.h"
#include "engine/models/safetensors_file.h"
#include "tests/engine/models/label_channel_content.h"
#include "tests/engine/support.h"
#include "tests/temporary_folder.h"

namespace attnd::engine::test {
namespace {

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;

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

  const uint64_t seed_ = TestSeed();
  const testing::ScopedTrace trace_{__FILE__, __LINE__, testing::Message() << "seed " << seed_};
  Random random_{seed_};
  const attnd::test::TemporaryFolder folder_;
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

}  // namespace
}  // namespace attnd::engine::test
