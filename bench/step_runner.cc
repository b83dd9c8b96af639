// SPDX-License-Identifier: Apache-2.0
#include "bench/step_runner.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "bench/support.h"
#include "common/dtype.h"

namespace attnd::bench {

using Clock = std::chrono::steady_clock;

namespace {

struct NamedParameters {
  std::string name;
  std::map<std::string, std::string> parameters;
};

// NAME[:key=value,...]
NamedParameters Split(const std::string& text) {
  const std::vector<std::string> halves = absl::StrSplit(text, absl::MaxSplits(':', 1));
  NamedParameters split{halves[0], {}};
  if (halves.size() == 2) {
    for (const auto& item : absl::StrSplit(halves[1], ',')) {
      const std::pair<std::string, std::string> pair =
          absl::StrSplit(item, absl::MaxSplits('=', 1));
      split.parameters.insert(pair);
    }
  }
  return split;
}

attention::TreeSizes ParseTreeSizes(const std::map<std::string, std::string>& parameters) {
  attention::TreeSizes sizes;
  for (const auto& [key, value] : parameters) {
    uint32_t* const size = key == "leaf_tokens" ? &sizes.leaf_tokens
                           : key == "fan"       ? &sizes.fan
                           : key == "levels"    ? &sizes.levels
                                                : nullptr;
    if (size == nullptr || !absl::SimpleAtoi(value, size)) {
      Must(absl::InvalidArgumentError("a tree has no " + key + "=" + value));
    }
  }
  return sizes;
}

}  // namespace

attention::Policy ParsePolicyText(const std::string& text) {
  const auto [name, parameters] = Split(text);
  auto policy = attention::ParsePolicy(name, parameters);
  if (!policy.ok()) {
    std::fprintf(stderr, "%s\n", policy.status().ToString().c_str());
    std::exit(2);
  }
  return *std::move(policy);
}

attention::IndexSet ParseIndexText(const std::string& text) {
  const auto [name, parameters] = Split(text);
  attention::IndexSet indexes;
  for (const attention::IndexKindInfo& info : attention::kIndexKindInfos) {
    if (info.name == name && info.clusters.has_value()) indexes.Add(info.kind);
  }
  if (indexes.empty()) Must(absl::InvalidArgumentError("no index of clusters is named " + name));
  if (!parameters.empty()) indexes.set_tree_sizes(ParseTreeSizes(parameters));
  Must(indexes.Validate());
  return indexes;
}

StepRunner::StepRunner(attention::Backend* backend, const SyntheticSequence& sequence,
                       uint64_t tokens)
    : backend_(backend), queries_(MakeQueries(sequence.view->shape, 7)) {
  // As a bf16 model's are.
  for (float& q : queries_) q = Bf16ToFloat(FloatToBf16(q));
  const ModelShape& shape = sequence.view->shape;
  out_.resize(size_t{shape.query_heads} * shape.value_dim);
  lse_.resize(shape.query_heads);
  row_.view = sequence.view;
  row_.past_tokens = tokens;
  row_.query_tokens = 1;
  row_.query_only = true;
  row_.queries = reinterpret_cast<const std::byte*>(queries_.data());
  row_.out = out_.data();
  row_.lse = lse_.data();
  row_.stats = &stats_;
}

double StepRunner::Seconds(const attention::Policy& policy) {
  row_.policy = &policy;
  attention::StepRequest request;
  request.rows = {&row_, 1};
  const auto start = Clock::now();
  Must(backend_->Step(request));
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace attnd::bench
