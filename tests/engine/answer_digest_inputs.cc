// SPDX-License-Identifier: Apache-2.0
#include "tests/engine/answer_digest_inputs.h"

#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/safetensors.h"

namespace attnd::engine::test {
namespace {

using attention::Policy;
using Parameters = std::map<std::string, std::string>;

constexpr uint64_t kCentres = 20;  // of each head

// splitmix64's output function.
uint64_t Scatter(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// A multiple of 1/64 in [-range / 64, range / 64].
float Around(uint64_t hash, int range) {
  const int span = 2 * range + 1;
  return static_cast<float>(static_cast<int>(hash % static_cast<uint64_t>(span)) - range) / 64;
}

Model MakeModel(const std::string& name, DType dtype, uint32_t layers, uint32_t query_heads,
                uint32_t kv_heads, uint32_t head_dim, uint32_t value_dim, float softmax_scale) {
  ModelShape shape;
  shape.layers = layers;
  shape.query_heads = query_heads;
  shape.kv_heads = kv_heads;
  shape.head_dim = head_dim;
  shape.value_dim = value_dim;
  shape.dtype = dtype;
  shape.softmax_scale = softmax_scale;
  shape.latent = name.starts_with("latent");
  return {absl::StrCat(name, "_", DTypeName(dtype)), shape};
}

std::vector<Parameters> Variants(const std::string& preset) {
  static const std::map<std::string, std::vector<Parameters>> kVariants = {
      {"streaming", {{{"window", "32"}}}},
      {"quest", {{{"budget", "128"}, {"block", "64"}}, {{"budget", "96"}}}},
      {"double-sparsity", {{{"budget", "96"}}, {{"budget", "5%"}}}},
      {"twilight", {{{"selector", "double-sparsity"}, {"p", "0.8"}}, {{"selector", "full"}}}},
      {"asynctls",
       {{{"budget", "128"}, {"blocks", "8"}}, {{"budget", "128"}, {"blocks", "8"}, {"lag", "0"}}}},
      {"clusters-top-k", {{{"estimator", "second-order"}, {"exact", "0.05"}}}},
      {"double-p", {{{"estimator", "second-order"}}, {{"p2", "0.3"}}}},
      {"topk-completion",
       {{{"completion", "on"}, {"budget", "64"}},
        {{"completion", "on"}, {"budget", "64"}, {"selector", "quest"}},
        {{"completion", "off"}}}},
      {"error-target", {{{"tolerance", "0.02"}, {"dense_layers", "1"}}, {{"tolerance", "0.0005"}}}},
  };
  const auto found = kVariants.find(preset);
  return found == kVariants.end() ? std::vector<Parameters>() : found->second;
}

// A safetensors file in the making.
class ModelFile {
 public:
  void Add(const std::string& name, const char* dtype, std::vector<uint64_t> shape,
           const void* values, size_t bytes) {
    TensorEntry& entry = head_.tensors[name];
    entry.dtype = dtype;
    entry.shape = std::move(shape);
    entry.begin = data_.size();
    data_.append(static_cast<const char*>(values), bytes);
    entry.end = data_.size();
  }
  // Random multiples of 1/64 from -range / 64 to range / 64.
  void AddWeights(const std::string& name, const std::vector<uint64_t>& shape, int range) {
    uint64_t count = 1;
    for (const uint64_t extent : shape) count *= extent;
    std::vector<float> values;
    for (uint64_t i = 0; i < count; ++i) {
      values.push_back(Around(Mix(4000 + data_.size(), i), range));
    }
    Add(name, "F32", shape, values.data(), values.size() * sizeof(float));
  }
  void Set(const std::string& name, const std::string& text) { head_.metadata[name] = text; }
  void Write(const std::string& path) const {
    const auto head = EncodeHead(head_);
    ASSERT_TRUE(head.ok()) << head.status();
    std::ofstream(path, std::ios::binary) << *head << data_;
  }

 private:
  SafetensorsHead head_;
  std::string data_;
};

}  // namespace

uint64_t Mix(uint64_t a, uint64_t b) { return Scatter(Scatter(a) ^ b); }

Tensor MakeTensor(DType dtype, TensorKind kind, uint64_t salt, uint64_t tokens, uint64_t heads,
                  uint64_t group, uint64_t dim) {
  const bool queries = kind == TensorKind::kQueries;
  const auto of_centre = static_cast<uint64_t>(queries ? TensorKind::kKeys : kind);
  std::vector<float> values;
  values.reserve(tokens * heads * dim);
  for (uint64_t token = 0; token < tokens; ++token) {
    const uint64_t centre = Mix(queries ? Mix(salt, 1) : salt, token / 3) % kCentres;
    for (uint64_t head = 0; head < heads; ++head) {
      const uint64_t centre_hash = Mix(of_centre * kCentres + centre, head / group);
      const uint64_t noise_hash = Mix(Mix(salt, static_cast<uint64_t>(kind)), token * heads + head);
      for (uint64_t c = 0; c < dim; ++c) {
        values.push_back(Around(Mix(centre_hash, c), 96) + Around(Mix(noise_hash, c), 40));
      }
    }
  }
  Tensor tensor{dtype, values.size(), std::vector<std::byte>(values.size() * DTypeBytes(dtype))};
  FromFloat(dtype, values.data(), values.size(), tensor.bytes.data());
  return tensor;
}

std::vector<Model> Models() {
  return {
      MakeModel("plain64", DType::kFp32, 2, 1, 1, 64, 64, 0.125f),
      MakeModel("plain128", DType::kFp16, 1, 1, 1, 128, 128, 0.09375f),
      MakeModel("grouped64", DType::kFp16, 1, 3, 1, 64, 64, 0.125f),
      MakeModel("grouped128", DType::kBf16, 1, 8, 2, 128, 128, 0.09375f),
      MakeModel("grouped80x48", DType::kFp32, 1, 6, 1, 80, 48, 0.125f),
      MakeModel("latent112", DType::kBf16, 1, 5, 1, 112, 64, 0.125f),
  };
}

bool ReadsAKeepSet(const Policy& policy) {
  return policy.selector == attention::Selector::kKeepSet;
}

std::vector<Policy> Presets() {
  std::vector<Policy> presets = attention::PresetPolicies();
  for (Policy& preset : presets) {
    if (ReadsAKeepSet(preset)) preset.budget = {.tokens = 96};
  }
  return presets;
}

std::vector<Policy> PoliciesOf(const Policy& preset) {
  std::vector<Policy> policies = {preset};
  for (const Parameters& parameters : Variants(preset.preset)) {
    auto policy = attention::ParsePolicy(preset.preset, parameters);
    EXPECT_TRUE(policy.ok()) << policy.status();
    if (policy.ok()) policies.push_back(*std::move(policy));
  }
  return policies;
}

void WriteFeatureMaps(const Model& model, const std::string& path) {
  constexpr uint64_t kWidth = 32, kInner = 48;
  const ModelShape& shape = model.shape;
  ModelFile file;
  for (const auto& [side, heads] :
       {std::pair("query", shape.query_heads), std::pair("key", shape.kv_heads)}) {
    const auto add = [&, &side = side, &heads = heads](const char* part,
                                                       std::vector<uint64_t> extents, int range) {
      extents.insert(extents.begin(), {shape.layers, heads});
      file.AddWeights(absl::StrCat(side, ".", part), extents, range);
    };
    add("stem.weight", {kWidth, shape.head_dim}, 10);
    add("stem.bias", {kWidth}, 20);
    add("inner.weight", {kInner, kWidth}, 16);
    add("inner.bias", {kInner}, 20);
    add("outer.weight", {kWidth, kInner}, 14);
    add("outer.bias", {kWidth}, 20);
    add("alpha", {}, 32);
    add("output.weight", {shape.head_dim, kWidth}, 16);
    add("output.bias", {shape.head_dim}, 32);
  }
  std::vector<int64_t> completed;
  for (uint32_t i = 0; i < shape.layers * shape.query_heads; ++i) completed.push_back(i % 2);
  file.Add("completed", "I64", {shape.layers, shape.query_heads}, completed.data(),
           completed.size() * sizeof(int64_t));
  file.Set("format", "attnd.feature_maps.1");
  file.Set("fingerprint", model.fingerprint());
  file.Set("prefill_tokens", "16384");
  file.Set("softmax_scale", absl::StrCat(shape.softmax_scale));
  file.Write(path);
}

void WriteLabelChannels(const Model& model, const std::string& path) {
  const ModelShape& shape = model.shape;
  std::vector<int64_t> channels;
  for (uint32_t head = 0; head < shape.layers * shape.kv_heads; ++head) {
    for (uint32_t c = head % 4; c < shape.head_dim; c += 4) channels.push_back(c);
  }
  ModelFile file;
  file.Add("channels", "I64", {shape.layers, shape.kv_heads, shape.head_dim / 4}, channels.data(),
           channels.size() * sizeof(int64_t));
  file.Set("format", "attnd.label_channels.1");
  file.Set("fingerprint", model.fingerprint());
  file.Set("head_dim", absl::StrCat(shape.head_dim));
  file.Write(path);
}

}  // namespace attnd::engine::test
