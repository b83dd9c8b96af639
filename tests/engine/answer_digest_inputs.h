// SPDX-License-Identifier: Apache-2.0
//
// What answer_digests_test.cc feeds the engine: numbers, models, policies, and the files that a
// server of these models is started with. Everything here is fixed for ever: a change of any number
// changes the stored digests. So nothing is shared with the other tests' helpers, and numbers are
// made of integers, which no compiler and no library rounds in another way.
#ifndef ATTND_TESTS_ENGINE_ANSWER_DIGEST_INPUTS_H_
#define ATTND_TESTS_ENGINE_ANSWER_DIGEST_INPUTS_H_

#include <cstddef>
#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "attention/policy/policy.h"
#include "common/dtype.h"
#include "common/model_shape.h"
#include "engine/engine.h"

namespace attnd::engine::test {

uint64_t Mix(uint64_t a, uint64_t b);  // a hash of both

struct Tensor {
  DType dtype = DType::kFp32;
  uint64_t elements = 0;
  std::vector<std::byte> bytes;

  TensorView view() const { return {dtype, bytes.data(), elements}; }
  // Elements [first, first + count).
  TensorView view(uint64_t first, uint64_t count) const {
    return {dtype, bytes.data() + first * DTypeBytes(dtype), count};
  }
};

// Keys and queries of a head lie around the same few centres, so that attention has peaks.
enum class TensorKind : uint64_t { kKeys = 1, kValues = 2, kQueries = 3 };

// [tokens, heads, dim] of `salt`; `group` query heads share the centres of one KV head (1 for keys
// and values).
Tensor MakeTensor(DType dtype, TensorKind kind, uint64_t salt, uint64_t tokens, uint64_t heads,
                  uint64_t group, uint64_t dim);

struct Model {
  std::string name;
  ModelShape shape;

  std::string fingerprint() const { return "model " + name; }
  friend void PrintTo(const Model& model, std::ostream* out) { *out << model.name; }
};

// Every dtype, with groups of query heads and without, groups that fill the kernels' quads and that
// do not, values of another width than keys, a latent head.
std::vector<Model> Models();

// What sequences are opened with: every preset with its defaults, but for keep-sets, of which only
// the opening policy decides: small ones.
std::vector<attention::Policy> Presets();
// The preset as it is, and with smaller budgets and other parts: the defaults leave out
// little of a prompt of some thousand tokens.
std::vector<attention::Policy> PoliciesOf(const attention::Policy& preset);

bool ReadsAKeepSet(const attention::Policy& policy);

// Feature maps of the model, as safetensors (EngineOptions::feature_maps).
void WriteFeatureMaps(const Model& model, const std::string& path);
// Label channels of the model: every fourth one (EngineOptions::label_channels).
void WriteLabelChannels(const Model& model, const std::string& path);

}  // namespace attnd::engine::test

#endif  // ATTND_TESTS_ENGINE_ANSWER_DIGEST_INPUTS_H_
