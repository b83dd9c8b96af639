// SPDX-License-Identifier: Apache-2.0
//
// Goal: files of feature maps are read as they were written, wrong ones are refused by name, and a
// server takes a summary for what it is: made with one file of maps. Method: random maps there and
// back; good files with one thing wrong, and random damage; engines with and without maps, over one
// data folder, and sequences in memory and on disk side by side.
#include "engine/models/feature_map_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/safetensors.h"
#include "engine/archive/chain.h"
#include "engine/engine.h"
#include "tests/attention/completion/completion_support.h"
#include "tests/engine/support.h"
#include "tests/temporary_folder.h"

namespace attnd::engine::test {
namespace {

using attention::FeatureMapParts;
using attention::FeatureMapSide;
using attnd::test::TemporaryFolder;
using testing::HasSubstr;

// A file in parts, so that each can be spoilt.
struct Content {
  SafetensorsHead head;
  std::string data;

  template <typename T>
  void Add(const std::string& name, const char* dtype, std::vector<uint64_t> shape,
           const std::vector<T>& values) {
    TensorEntry& entry = head.tensors[name];
    entry.dtype = dtype;
    entry.shape = std::move(shape);
    entry.begin = data.size();
    data.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
    entry.end = data.size();
  }
  std::string Bytes() const { return EncodeHead(head).value() + data; }
};

void AddSide(const std::string& name, const FeatureMapSide& side, uint64_t heads,
             const FeatureMapParts& p, Content* content) {
  const auto add = [&](const char* part, std::vector<uint64_t> shape,
                       const std::vector<float>& values) {
    shape.insert(shape.begin(), {p.layers, heads});
    content->Add(name + "." + part, "F32", std::move(shape), values);
  };
  add("stem.weight", {p.width, p.head_dim}, side.stem_weight);
  add("stem.bias", {p.width}, side.stem_bias);
  add("inner.weight", {p.inner, p.width}, side.inner_weight);
  add("inner.bias", {p.inner}, side.inner_bias);
  add("outer.weight", {p.width, p.inner}, side.outer_weight);
  add("outer.bias", {p.width}, side.outer_bias);
  add("alpha", {}, side.alpha);
  add("output.weight", {p.head_dim, p.width}, side.output_weight);
  add("output.bias", {p.head_dim}, side.output_bias);
}

Content ContentOf(const FeatureMapParts& parts) {
  Content content;
  AddSide("query", parts.query, parts.query_heads, parts, &content);
  AddSide("key", parts.key, parts.kv_heads, parts, &content);
  const std::vector<int64_t> completed(parts.completed.begin(), parts.completed.end());
  content.Add("completed", "I64", {parts.layers, parts.query_heads}, completed);
  content.head.metadata = {{"format", kFeatureMapFormat},
                           {"fingerprint", "test"},  // of ArgsOf
                           {"prefill_tokens", "16384"},
                           {"softmax_scale", std::to_string(parts.softmax_scale)}};
  return content;
}

class FeatureMapFilesTest : public testing::Test {
 protected:
  FeatureMapParts Parts(uint64_t seed) const {
    attention::test::Random random(seed);
    return attention::test::RandomParts(shape_, 32, 48, &random);
  }
  std::string Write(const std::string& name, const std::string& bytes) const {
    const std::string path = folder_.Path(name);
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }
  std::unique_ptr<Engine> Start(const std::vector<std::string>& maps, bool archive = false) const {
    EngineOptions options = SmallOptions();
    options.feature_maps = maps;
    if (archive) {
      options.archive.data_dir = folder_.Path("data");
      options.archive.page_memory_bytes = uint64_t{1} << 20;
    }
    return MakeEngine(options);
  }

  const ModelShape shape_ = MakeShape(2, 4, 2, 64, 64, DType::kBf16);
  const uint64_t seed_ = TestSeed();
  const testing::ScopedTrace trace_{__FILE__, __LINE__, testing::Message() << "seed " << seed_};
  Random random_{seed_};
  const TemporaryFolder folder_;
};

TEST_F(FeatureMapFilesTest, AreReadAsTheyWereWritten) {
  const FeatureMapParts parts = Parts(seed_);
  const auto expected = attention::FeatureMaps::Make(parts);
  ASSERT_TRUE(expected.ok());
  const auto file = DecodeFeatureMaps(ContentOf(parts).Bytes());
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->fingerprint, "test");
  EXPECT_EQ(file->maps->identity().size(), 32u);
  std::vector<float> x(4 * 64), a(4 * 64), b(4 * 64);
  for (float& number : x) number = random_.Number();
  for (uint32_t layer = 0; layer < 2; ++layer) {
    for (uint32_t head = 0; head < 4; ++head) {
      file->maps->QueryFeatures(layer, head, x.data(), a.data());
      (*expected)->QueryFeatures(layer, head, x.data(), b.data());
      EXPECT_EQ(a, b);
      EXPECT_EQ(file->maps->completed(layer, head), (*expected)->completed(layer, head));
    }
    file->maps->KeyFeatures(layer, 1, x.data(), a.data());
    (*expected)->KeyFeatures(layer, 1, x.data(), b.data());
    EXPECT_EQ(a, b);
  }
  const auto other = DecodeFeatureMaps(ContentOf(Parts(seed_ + 1)).Bytes());
  ASSERT_TRUE(other.ok());
  EXPECT_NE(other->maps->identity(), file->maps->identity());
}

TEST_F(FeatureMapFilesTest, WrongOnesAreRefusedByName) {
  const Content good = ContentOf(Parts(seed_));
  const struct {
    const char* named;
    std::function<void(Content*)> spoil;
  } kCases[] = {
      {"metadata format", [](Content* c) { c->head.metadata["format"] = "other"; }},
      {"metadata fingerprint", [](Content* c) { c->head.metadata.erase("fingerprint"); }},
      {"metadata prefill_tokens", [](Content* c) { c->head.metadata["prefill_tokens"] = "-1"; }},
      {"metadata softmax_scale", [](Content* c) { c->head.metadata["softmax_scale"] = "nan"; }},
      {"query.alpha", [](Content* c) { c->head.tensors.erase("query.alpha"); }},
      {"key.stem.weight", [](Content* c) { c->head.tensors["key.stem.weight"].dtype = "I32"; }},
      {"query.outer.weight",
       [](Content* c) {
         std::swap(c->head.tensors["query.outer.weight"].shape[2],
                   c->head.tensors["query.outer.weight"].shape[3]);
       }},
      {"key.output.bias", [](Content* c) { c->head.tensors["key.output.bias"].shape = {256}; }},
      {"completed", [](Content* c) { c->data[c->head.tensors["completed"].begin] = 2; }},
      {"query.inner.bias",
       [](Content* c) {
         const float nan = std::nanf("");
         std::memcpy(&c->data[c->head.tensors["query.inner.bias"].begin], &nan, sizeof(nan));
       }},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.named);
    Content content = good;
    c.spoil(&content);
    const absl::Status status = DecodeFeatureMaps(content.Bytes()).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.named));
  }
}

// Nothing is read beyond the file, whatever it says; under the address sanitizer above all.
TEST_F(FeatureMapFilesTest, DamageIsRefusedOrHarmless) {
  const std::string good = ContentOf(Parts(seed_)).Bytes();
  for (const size_t size : {size_t{0}, size_t{7}, size_t{8}, size_t{500}, good.size() - 1}) {
    EXPECT_TRUE(absl::IsInvalidArgument(DecodeFeatureMaps(good.substr(0, size)).status())) << size;
  }
  const size_t head = 8 + DecodeHeadLength(good, good.size()).value();
  for (int i = 0; i < 300; ++i) {
    std::string bytes = good;
    bytes[random_.Below(i % 2 == 0 ? head : bytes.size())] = static_cast<char>(random_.Below(256));
    const auto file = DecodeFeatureMaps(bytes);
    EXPECT_TRUE(file.ok() || absl::IsInvalidArgument(file.status())) << file.status();
  }
}

TEST_F(FeatureMapFilesTest, AServerHasOneFileForAModel) {
  const std::string bytes = ContentOf(Parts(seed_)).Bytes();
  const auto load = [](const std::vector<std::string>& paths) {
    return FeatureMapStore::Load(paths).status();
  };
  const std::string good = Write("good", bytes);
  EXPECT_TRUE(load({}).ok());
  EXPECT_TRUE(load({good}).ok());
  for (const auto& paths : {std::vector<std::string>{good, Write("twin", bytes)},
                            {folder_.Path("missing")},
                            {folder_.path()},
                            {Write("short", bytes.substr(0, 100))}}) {
    const absl::Status status = load(paths);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(paths.back()));
  }
}

TEST_F(FeatureMapFilesTest, ASummaryNeedsTheModelsMaps) {
  const auto policy = PolicyOf("topk-completion");
  const auto without = Start({});
  const auto refused = without->Open(kTenant, ArgsOf(shape_, policy)).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("no feature maps for the model"));
  EXPECT_TRUE(
      without->Open(kTenant, ArgsOf(shape_, PolicyOf("topk-completion", {{"completion", "off"}})))
          .ok());
  const auto with = Start({Write("maps", ContentOf(Parts(seed_)).Bytes())});
  EXPECT_TRUE(with->Open(kTenant, ArgsOf(shape_, policy)).ok());
  OpenArgs args = ArgsOf(shape_, policy);
  args.fingerprint = "another";
  EXPECT_TRUE(absl::IsFailedPrecondition(with->Open(kTenant, args).status()));
  args = ArgsOf(MakeShape(2, 4, 2, 32, 64, DType::kBf16), policy);
  EXPECT_TRUE(absl::IsFailedPrecondition(with->Open(kTenant, args).status()));
}

TEST_F(FeatureMapFilesTest, SegmentsOfOtherMapsHaveOtherNames) {
  OpenArgs args = ArgsOf(shape_, PolicyOf("topk-completion"));
  args.indexes = {attention::IndexKind::kSummary};
  const std::vector<uint32_t> ids(512, 7);
  const ChainLink link = {kNoChain, 0, 4, ids};
  args.model_parts.feature_maps_id = "one";
  const auto one = ChainNames({}, kTenant, args).NameOf(link);
  args.model_parts.feature_maps_id = "other";
  const auto other = ChainNames({}, kTenant, args).NameOf(link);
  ASSERT_TRUE(one.ok() && other.ok());
  EXPECT_NE(*one, *other);
}

// From disk as from memory, bit for bit, though the exhaustive selector wants every page; and only
// under the maps that it was made with.
TEST_F(FeatureMapFilesTest, SealedSequencesGoOnUnderTheSameMaps) {
  const std::string maps = Write("maps", ContentOf(Parts(seed_)).Bytes());
  const std::string others = Write("others", ContentOf(Parts(seed_ + 1)).Bytes());
  const std::vector<attention::Policy> policies = {
      PolicyOf("topk-completion", {{"completion", "on"}}), PolicyOf("topk-completion"),
      PolicyOf("topk-completion", {{"completion", "on"}, {"budget", "300"}}),
      PolicyOf("topk-completion", {{"selector", "quest"}, {"completion", "on"}})};
  OpenArgs args = ArgsOf(shape_, policies[0]);
  args.indexes = {attention::IndexKind::kSummary, attention::IndexKind::kBlocks16};
  uint64_t sealed_id = 0;
  std::vector<RowAnswer> expected;
  std::vector<Row> rows;
  {
    const auto engine = Start({maps}, /*archive=*/true);
    TestSequence sequence(engine.get(), engine->Open(kTenant, args).value(), shape_);
    Prefill(&sequence, 3000, &random_);
    FinishPrefill(&sequence);
    for (const attention::Policy& policy : policies) {
      for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
        Row row = QueryOnlyRow(&sequence, layer, 2, &random_);
        row.policy = policy;
        const Message message(layer, {row});
        const Answer answer = Send(engine.get(), message);
        ASSERT_TRUE(answer.row_status(0).ok()) << answer.row_status(0);
        EXPECT_GT(answer.result.rows[0].stats.estimated_tokens, 0u);
        expected.push_back(AnswerOf(message, answer, 0));
        rows.push_back(row);
      }
    }
    sealed_id = engine->Seal(kTenant, sequence.id, nullptr).value().sealed_id;
  }
  for (const auto& files : {std::vector<std::string>{}, {others}}) {
    const auto engine = Start(files, /*archive=*/true);
    const auto status = engine->Resume(kTenant, ArgsOf(shape_), sealed_id, nullptr).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("feature maps"));
  }
  const auto engine = Start({maps}, /*archive=*/true);
  const auto opened = engine->Resume(kTenant, ArgsOf(shape_), sealed_id, nullptr);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_TRUE(engine->MayReadDisk(kTenant, opened->sequence_id));
  TestSequence resumed(engine.get(), opened->sequence_id, shape_);
  for (size_t i = 0; i < rows.size(); ++i) {
    const uint32_t layer = static_cast<uint32_t>(i % shape_.layers);
    Row row = rows[i];
    row.sequence = &resumed;
    const Message message(layer, {row});
    AnswerVectors memory;
    DecodeResult result;
    ASSERT_TRUE(engine->Decode(kTenant, kWriter, message.args, memory, &result).ok());
    ASSERT_TRUE(result.rows[0].status.ok()) << result.rows[0].status;
    EXPECT_EQ(memory.out(), expected[i].out) << "row " << i;
    EXPECT_EQ(memory.lse(), expected[i].lse) << "row " << i;
    const attention::RowStats& stats = result.rows[0].stats;
    EXPECT_EQ(stats.host_tokens + stats.ssd_tokens, stats.zone_tokens + stats.exact_tokens);
  }
}

}  // namespace
}  // namespace attnd::engine::test
