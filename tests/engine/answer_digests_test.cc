// SPDX-License-Identifier: Apache-2.0
//
// Goal: a change that must not change answers (a move, a renaming, another way to the same numbers)
// is shown to change no bit of them. Method: a fixed set of sequences lives a fixed life under
// every preset policy: prompt, decode steps, growth, fork, truncation, seal, resume. A digest of
// each part of that life covers output, log-sum-exp, counts of tokens, masses and predicted errors,
// and is compared with answer_digests.txt. The test uses the engine's public interface and makes
// its own numbers, so that neither moved classes nor changed test helpers move a digest.
//
// ATTND_STORE_DIGESTS=1 answer_digests_test makes the lines of this processor's targets anew and
// keeps the others. Do so only for a change that is meant to change answers. Every run prints its
// lines ("digest ..."), so that two builds can be compared on any processor.
//
// Each instruction set adds in an order of its own, so digests are stored by target. On a processor
// with a target that is not stored, that target is run and printed, and its tests are skipped with
// a reason that names the target; no processor passes without a target that is compared, and every
// x86-64 processor has SSE4. GCC 12 and Clang 14 with -O3 gave the same bits for all cases, GCC 12
// with -O0 for the two models that were tried (plain64, grouped128 under AVX2). The C library's
// exp, log, erf and hypot may differ in another version: a mismatch says if they do, and then only
// two builds on one machine can be compared.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "attention/cpu/cpu_backend.h"
#include "attention/policy/policy.h"
#include "common/dtype.h"
#include "common/model_shape.h"
#include "engine/answer_memory.h"
#include "engine/engine.h"
#include "tests/attention/kernels/targets.h"
#include "tests/engine/answer_digest_inputs.h"
#include "tests/temporary_folder.h"

namespace attnd::engine::test {
namespace {

using attention::IndexSet;
using attention::Policy;

constexpr char kTenant[] = "tenant";
constexpr WriterId kWriter = 1;
constexpr uint64_t kPrompt = 1250;         // two segments and a tail
constexpr uint64_t kObserved = 32;         // newest tokens of the prompt whose queries are sent
constexpr uint64_t kGrowth = 500;          // tokens that make the background build one more segment
constexpr uint64_t kForkLength = 900;      // within the second segment
constexpr uint64_t kTruncated = 1133;      // within the third segment
constexpr uint64_t kReadLength = 700;      // of the resumed sequence, within the second segment
constexpr uint64_t kTokensMax = 4096;      // of any sequence
constexpr uint64_t kPageBytes = 1u << 20;  // of memory for pages: fewer than a sequence has

// Where a sequence of the preset is cut: at `length`, or behind the prompt, without which there is
// no keep-set.
uint64_t CutOf(const Policy& preset, uint64_t length) {
  return ReadsAKeepSet(preset) ? kPrompt + length / 10 : length;
}

// ----------------------------------------------------------------------------------------------
// Digests and the file that stores them.

// FNV-1a, 64 bits.
class Digest {
 public:
  void Add(const void* bytes, size_t count) {
    const auto* p = static_cast<const unsigned char*>(bytes);
    for (size_t i = 0; i < count; ++i) state_ = (state_ ^ p[i]) * 0x100000001b3;
  }
  void Add(uint64_t value) { Add(&value, sizeof(value)); }
  void Add(const std::optional<float>& value) {
    const float number = value.value_or(0);
    Add(uint64_t{value.has_value()});
    Add(&number, sizeof(number));
  }
  void Add(const std::vector<float>& values) {
    Add(uint64_t{values.size()});
    Add(values.data(), values.size() * sizeof(float));
  }
  // Tokens read exactly count as one sum, wherever they were read from: which of them were in
  // memory depends on the disk's speed.
  void Add(const attention::RowStats& stats) {
    for (const uint64_t count :
         {stats.zone_tokens, stats.exact_tokens, stats.estimated_tokens, stats.dropped_tokens,
          stats.missed_tokens, stats.host_tokens + stats.ssd_tokens + stats.hbm_tokens}) {
      Add(count);
    }
    for (const auto& share : {stats.covered_mass, stats.exact_mass, stats.predicted_error_mean,
                              stats.predicted_error_max, stats.missed_mass}) {
      Add(share);
    }
  }
  std::string ToString() const { return absl::StrFormat("%016x", state_); }

 private:
  uint64_t state_ = 0xcbf29ce484222325;
};

// What answers take from the C library: not the same bits in every version and on every processor.
std::string MathDigest() {
  Digest digest;
  for (int i = -4000; i <= 4000; ++i) {
    const double x = i / 128.0 / 3.0;
    const float single = static_cast<float>(x);
    const double doubles[] = {std::exp(x), std::log(std::abs(x) + 0.01)};
    const float singles[] = {std::exp(single), std::log(std::abs(single) + 0.01f), std::erf(single),
                             std::hypot(single, 1.5f)};
    digest.Add(doubles, sizeof(doubles));
    digest.Add(singles, sizeof(singles));
  }
  return digest.ToString();
}

// The parts of a sequence's life, each with a digest of its own.
enum Part { kDecode, kHistory, kDisk, kParts };
constexpr const char* kPartNames[kParts] = {"decode", "history", "disk"};

// "TARGET MODEL PRESET" -> the digests of the parts; "TARGET C library" -> MathDigest() of where
// they were made.
using Digests = std::map<std::string, std::vector<std::string>>;

class DigestFile {
 public:
  static std::string Path() { return ATTND_ANSWER_DIGESTS; }
  static Digests Read() {
    Digests digests;
    std::ifstream file(Path());
    for (std::string line; std::getline(file, line);) {
      if (line.empty() || line[0] == '#') continue;
      std::istringstream words(line);
      std::string target, model, preset;
      words >> target >> model >> preset;
      digests[absl::StrCat(target, " ", model, " ", preset)].assign(
          std::istream_iterator<std::string>(words), {});
    }
    return digests;
  }
  static bool HasTarget(const std::string& target) {
    const Digests digests = Read();
    return std::any_of(digests.begin(), digests.end(),
                       [&](const auto& line) { return line.first.starts_with(target + " "); });
  }
  // Puts `fresh` in the place of all lines that begin with `prefix`.
  static void Replace(const std::string& prefix, const Digests& fresh) {
    Digests digests = Read();
    std::erase_if(digests, [&](const auto& line) { return line.first.starts_with(prefix); });
    for (const auto& [name, parts] : fresh) digests[name] = parts;
    std::ofstream file(Path());
    file << "# Digests of answers: target, model, preset, then decode, history and disk.\n"
            "# answer_digests_test.cc says what they are of and how they are made.\n";
    for (const auto& [name, parts] : digests) {
      file << name;
      for (const std::string& part : parts) file << ' ' << part;
      file << '\n';
    }
    ASSERT_TRUE(file.flush()) << Path();
  }
};

// The name that a target's digests are stored under: AVX-512 has dot products beside it that not
// every such processor has (attention/x86_dot.h).
std::string StoredName(int64_t target) {
  std::string name = hwy::TargetName(target);
#if defined(__x86_64__)
  if (target <= HWY_AVX3 && __builtin_cpu_supports("avx512bf16")) name += "+bf16";
  if (target <= HWY_AVX3 && __builtin_cpu_supports("avx512vnni")) name += "+vnni";
#endif
  return name;
}

// ----------------------------------------------------------------------------------------------
// The life of a sequence.

// One sequence of an engine, asked one row at a time.
class Asked {
 public:
  Asked(Engine* engine, const Model& model, uint64_t id, uint64_t length, uint64_t salt)
      : engine_(engine), model_(model), id_(id), length_(length), salt_(salt) {}

  uint64_t id() const { return id_; }
  void set_length(uint64_t length) { length_ = length; }

  // Adds the answer of every layer to a row of `tokens` tokens, new ones unless query_only.
  void Step(uint32_t tokens, bool query_only, const std::optional<Policy>& policy, DType dtype,
            Digest* digest) {
    const ModelShape& shape = model_.shape;
    DecodeRow row;
    row.sequence_id = id_;
    row.position = length_;
    row.query_tokens = tokens;
    row.query_only = query_only;
    row.policy = policy;
    for (uint32_t layer = 0; layer < shape.layers; ++layer) {
      const uint64_t salt = Mix(salt_, ++steps_);
      const Tensor q = MakeTensor(dtype, TensorKind::kQueries, salt, tokens, shape.query_heads,
                                  shape.group(), shape.head_dim);
      const Tensor k = MakeTensor(shape.dtype, TensorKind::kKeys, salt, tokens, shape.kv_heads, 1,
                                  shape.head_dim);
      const Tensor v = MakeTensor(shape.dtype, TensorKind::kValues, salt, tokens, shape.kv_heads, 1,
                                  shape.value_dim);
      DecodeArgs args;
      args.layer = layer;
      args.rows = std::span(&row, 1);
      args.q = q.view();
      args.q_heads = shape.query_heads;
      args.q_head_dim = shape.head_dim;
      if (!query_only) {
        args.k = k.view();
        args.k_heads = shape.kv_heads;
        args.k_head_dim = shape.head_dim;
      }
      if (!query_only && !shape.latent) {
        args.v = v.view();
        args.v_heads = shape.kv_heads;
        args.v_value_dim = shape.value_dim;
      }
      AnswerVectors answer;
      DecodeResult result;
      const absl::Status status = engine_->Decode(kTenant, kWriter, args, answer, &result);
      ASSERT_TRUE(status.ok()) << status;
      ASSERT_TRUE(result.rows.at(0).status.ok()) << result.rows[0].status;
      digest->Add(answer.out());
      digest->Add(answer.lse());
      digest->Add(result.rows[0].stats);
      // A step that completes a run has a segment built of it, at some later moment.
      engine_->WaitForBackground();
    }
    if (!query_only) length_ += tokens;
  }

  // New tokens one by one and three at a time, then questions under each policy.
  void Steps(const std::vector<Policy>& policies, Digest* digest) {
    for (const uint32_t tokens : {1u, 1u, 3u}) {
      if (testing::Test::HasFatalFailure()) return;
      Step(tokens, /*query_only=*/false, std::nullopt, DType::kFp32, digest);
    }
    for (const Policy& policy : policies) {
      if (testing::Test::HasFatalFailure()) return;
      Step(2, /*query_only=*/true, policy, DType::kBf16, digest);
    }
  }

 private:
  Engine* const engine_;
  const Model& model_;
  const uint64_t id_;
  uint64_t length_;
  const uint64_t salt_;
  uint64_t steps_ = 0;
};

class AnswerDigests : public testing::TestWithParam<std::tuple<int64_t, Model>> {
 protected:
  void SetUp() override {
    attention::test::UseTarget(std::get<0>(GetParam()));
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      prompt_k_.push_back(MakeTensor(shape_.dtype, TensorKind::kKeys, 100 + layer,
                                     kPrompt + kGrowth, shape_.kv_heads, 1, shape_.head_dim));
      prompt_v_.push_back(MakeTensor(shape_.dtype, TensorKind::kValues, 100 + layer,
                                     kPrompt + kGrowth, shape_.kv_heads, 1, shape_.value_dim));
    }
    WriteFeatureMaps(model_, folder_.Path("maps"));
    WriteLabelChannels(model_, folder_.Path("labels"));
  }
  void TearDown() override {
    engine_.reset();
    attention::test::UseTarget(0);
  }

  // A server's start over the same data folder. Only models of bf16 have a file of label channels:
  // the others' labels are of their own keys.
  void Start() {
    engine_.reset();
    EngineOptions options;
    options.memory_budget_bytes = uint64_t{512} << 20;
    options.max_sequence_tokens = kTokensMax;
    options.segment_tokens = 512;
    options.archive.data_dir = folder_.Path("data");
    options.archive.page_memory_bytes = kPageBytes;
    options.feature_maps = {folder_.Path("maps")};
    if (shape_.dtype == DType::kBf16) options.label_channels = {folder_.Path("labels")};
    auto engine = Engine::Create(options, attention::MakeCpuBackend({.threads = 1}), nullptr);
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
  }

  OpenArgs ArgsOf(const Policy& preset) const {
    OpenArgs args;
    args.fingerprint = model_.fingerprint();
    args.shape = shape_;
    args.policy = preset;
    uint32_t bits = 0;
    for (const Policy& policy : PoliciesOf(preset)) bits |= policy.Indexes().bits();
    if (bits != 0) args.indexes = IndexSet::FromBits(bits);
    return args;
  }

  // The prompt's token ids, which no other preset's prompt has.
  static std::vector<uint32_t> IdsOf(const Policy& preset) {
    std::vector<uint32_t> ids(kPrompt + kGrowth);
    uint32_t of_preset = 0;
    for (const char c : preset.preset) of_preset = (31 * of_preset + static_cast<uint8_t>(c)) % 997;
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<uint32_t>(i % 777) + of_preset;
    return ids;
  }

  void Append(const Policy& preset, uint64_t id, uint64_t first, uint64_t tokens) {
    const std::vector<uint32_t> ids = IdsOf(preset);
    const uint64_t key_width = uint64_t{shape_.kv_heads} * shape_.head_dim;
    const uint64_t value_width = uint64_t{shape_.kv_heads} * shape_.value_dim;
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      AppendChunk chunk;
      chunk.layer = layer;
      chunk.first_position = first;
      chunk.tokens = tokens;
      chunk.k = prompt_k_[layer].view(first * key_width, tokens * key_width);
      if (!shape_.latent) {
        chunk.v = prompt_v_[layer].view(first * value_width, tokens * value_width);
      }
      chunk.token_ids = std::span(ids).subspan(first, tokens);
      const absl::Status status = engine_->Append(kTenant, kWriter, id, chunk);
      ASSERT_TRUE(status.ok()) << status;
    }
  }

  void Observe(uint64_t id) {
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      const Tensor queries = MakeTensor(shape_.dtype, TensorKind::kQueries, 200 + layer, kObserved,
                                        shape_.query_heads, shape_.group(), shape_.head_dim);
      ObservedChunk chunk;
      chunk.layer = layer;
      chunk.tokens = kObserved;
      chunk.heads = shape_.query_heads;
      chunk.head_dim = shape_.head_dim;
      chunk.queries = queries.view();
      const absl::Status status = engine_->Observe(kTenant, kWriter, id, chunk);
      ASSERT_TRUE(status.ok()) << status;
    }
  }

  // Prompt, steps, growth by one more segment, fork and truncation, seal.
  void LiveInMemory(const Policy& preset, uint64_t* sealed_id, Digest* digests) {
    const std::vector<Policy> policies = PoliciesOf(preset);
    const auto id = engine_->Open(kTenant, ArgsOf(preset));
    ASSERT_TRUE(id.ok()) << id.status();
    for (const auto& [first, end] : {std::pair(0, 650), {650, 651}, {651, int{kPrompt}}}) {
      Append(preset, *id, first, end - first);
    }
    if (ReadsAKeepSet(preset)) Observe(*id);
    const auto finished = engine_->FinishPrefill(kTenant, kWriter, *id, nullptr);
    ASSERT_TRUE(finished.ok()) << finished.status();
    ASSERT_GE(engine_->Info(kTenant, *id)->segments, 2u);

    Asked sequence(engine_.get(), model_, *id, kPrompt, 1);
    sequence.Steps(policies, &digests[kDecode]);
    ASSERT_TRUE(engine_->Truncate(kTenant, *id, kPrompt).ok());
    Append(preset, *id, kPrompt, kGrowth);
    sequence.set_length(kPrompt + kGrowth);
    sequence.Steps(policies, &digests[kDecode]);
    ASSERT_GE(engine_->Info(kTenant, *id)->segments, 3u);

    const auto fork = engine_->Fork(kTenant, *id, CutOf(preset, kForkLength));
    ASSERT_TRUE(fork.ok()) << fork.status();
    Asked child(engine_.get(), model_, fork->id, fork->committed_tokens, 2);
    child.Steps(policies, &digests[kHistory]);
    sequence.Steps(policies, &digests[kHistory]);

    const auto sealed = engine_->Seal(kTenant, *id, nullptr);
    ASSERT_TRUE(sealed.ok()) << sealed.status();
    *sealed_id = sealed->sealed_id;
    ASSERT_TRUE(engine_->Truncate(kTenant, *id, CutOf(preset, kTruncated)).ok());
    sequence.set_length(CutOf(preset, kTruncated));
    sequence.Steps(policies, &digests[kHistory]);
  }

  // Resumed page by page, then cut where a segment must be read whole; and another sequence that
  // begins with the segments that the prompt's token ids find. Keep-sets are not sealed: what was
  // opened for one goes on under `dense`.
  void LiveFromDisk(const Policy& opened_with, uint64_t sealed_id, Digest* digest) {
    const Policy dense = Presets().front();
    const Policy& preset = ReadsAKeepSet(opened_with) ? dense : opened_with;
    const std::vector<Policy> policies = PoliciesOf(preset);
    const auto opened = engine_->Resume(kTenant, ArgsOf(preset), sealed_id, nullptr);
    ASSERT_TRUE(opened.ok()) << opened.status();
    ASSERT_TRUE(engine_->MayReadDisk(kTenant, opened->sequence_id));
    Asked resumed(engine_.get(), model_, opened->sequence_id, opened->tokens_present, 3);
    resumed.Steps(policies, digest);

    ASSERT_TRUE(engine_->Truncate(kTenant, resumed.id(), kReadLength).ok());
    resumed.set_length(kReadLength);
    resumed.Steps(policies, digest);
    if (ReadsAKeepSet(opened_with)) return;  // the segments have no index that `dense` would open
    const auto reusing = engine_->OpenReusing(kTenant, ArgsOf(preset), IdsOf(opened_with), nullptr);
    ASSERT_TRUE(reusing.ok()) << reusing.status();
    ASSERT_GT(reusing->tokens_present, kForkLength);
    digest->Add(reusing->tokens_present);
    Asked second(engine_.get(), model_, reusing->sequence_id, reusing->tokens_present, 4);
    second.Steps(policies, digest);
  }

  void CompareWithStored(const std::string& prefix, const Digests& fresh) const {
    const Digests stored = DigestFile::Read();
    const auto library = stored.find(LibraryLine());
    const bool other_library =
        library != stored.end() && library->second != fresh.at(LibraryLine());
    for (const auto& [name, parts] : fresh) {
      if (name == LibraryLine()) continue;
      const auto found = stored.find(name);
      if (found == stored.end() || found->second.size() != parts.size()) {
        ADD_FAILURE() << name << ": no digest is stored in " << DigestFile::Path();
        continue;
      }
      for (size_t part = 0; part < parts.size(); ++part) {
        EXPECT_EQ(parts[part], found->second[part])
            << name << ": " << kPartNames[part]
            << (other_library ? " (exp, log, erf or hypot of this C library are others)" : "");
      }
    }
    for (const auto& [name, parts] : stored) {
      if (name.starts_with(prefix)) {
        EXPECT_TRUE(fresh.contains(name)) << name << " is stored, and no preset any more";
      }
    }
  }

  std::string LibraryLine() const { return absl::StrCat(target_, " C library"); }

  const std::string target_ = StoredName(std::get<0>(GetParam()));
  const Model& model_ = std::get<1>(GetParam());
  const ModelShape& shape_ = model_.shape;
  std::vector<Tensor> prompt_k_;  // of each layer, [kPrompt + kGrowth, kv_heads, head_dim]
  std::vector<Tensor> prompt_v_;  // the values, likewise
  const attnd::test::TemporaryFolder folder_;
  std::unique_ptr<Engine> engine_;
};

TEST_P(AnswerDigests, AreThoseStored) {
  const std::string prefix = absl::StrCat(target_, " ", model_.name, " ");
  const std::vector<Policy> presets = Presets();
  std::vector<std::vector<Digest>> digests(presets.size(), std::vector<Digest>(kParts));
  std::vector<uint64_t> sealed(presets.size());
  Start();
  for (size_t i = 0; i < presets.size(); ++i) {
    SCOPED_TRACE(prefix + presets[i].preset);
    ASSERT_NO_FATAL_FAILURE(LiveInMemory(presets[i], &sealed[i], digests[i].data()));
  }
  Start();
  Digests fresh;
  for (size_t i = 0; i < presets.size(); ++i) {
    SCOPED_TRACE(prefix + presets[i].preset);
    ASSERT_NO_FATAL_FAILURE(LiveFromDisk(presets[i], sealed[i], &digests[i][kDisk]));
    std::vector<std::string>& parts = fresh[prefix + presets[i].preset];
    for (const Digest& digest : digests[i]) parts.push_back(digest.ToString());
    std::printf("digest %s%s %s %s %s\n", prefix.c_str(), presets[i].preset.c_str(),
                parts[kDecode].c_str(), parts[kHistory].c_str(), parts[kDisk].c_str());
  }
  fresh[LibraryLine()] = {MathDigest()};
  if (std::getenv("ATTND_STORE_DIGESTS") != nullptr) return DigestFile::Replace(prefix, fresh);
  if (!DigestFile::HasTarget(target_)) {
    GTEST_SKIP() << "no answer digests are stored for the target " << target_;
  }
  CompareWithStored(prefix, fresh);
}

// Otherwise every case above might be skipped.
TEST(AnswerDigestsFile, HasATargetOfThisProcessor) {
  const std::vector<int64_t> targets = attention::test::HighwayTargets();
  EXPECT_TRUE(std::any_of(targets.begin(), targets.end(),
                          [](int64_t target) { return DigestFile::HasTarget(StoredName(target)); }))
      << "no answer was compared; " << DigestFile::Path();
}

std::string NameOf(const testing::TestParamInfo<std::tuple<int64_t, Model>>& info) {
  return absl::StrCat(hwy::TargetName(std::get<0>(info.param)), "_", std::get<1>(info.param).name);
}
INSTANTIATE_TEST_SUITE_P(Targets, AnswerDigests,
                         testing::Combine(testing::ValuesIn(attention::test::HighwayTargets()),
                                          testing::ValuesIn(Models())),
                         NameOf);

}  // namespace
}  // namespace attnd::engine::test
