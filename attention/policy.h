// SPDX-License-Identifier: Apache-2.0
//
// Policy: how much of the KV a query reads exactly and what becomes of the rest, as a composition
// of parts (docs/POLICIES.md). A preset is a named composition with defaults; a parameter overrides
// a number or a part.
#ifndef ATTND_ATTENTION_POLICY_H_
#define ATTND_ATTENTION_POLICY_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace attnd::attention {

// What may be read exactly besides the zones.
enum class Selector : uint8_t {
  kAll,       // every token: dense
  kNone,      // nothing: streaming
  kClusters,  // clusters of similar keys, ranked by what `cut` needs
};

// Which of the ranked candidates are read exactly.
enum class Cut : uint8_t {
  kTopK,         // fixed shares by mass: exact_share, then estimated_share (RetroInfer)
  kTopP,         // by cumulative mass: exact to p2, estimated to p1 (Double-P, section 4)
  kErrorBudget,  // by predicted error: what it takes to stay below tolerance, and a floor by mass
                 // (error-target)
};

// What stands for clusters that are not read exactly.
enum class Estimator : uint8_t {
  kCentroid,     // Z = s exp(a q.C), with the mean value
  kSecondOrder,  // the same times exp(d2 / 2), d2 the variance of the members' logits; predicts
                 // errors
};

// What becomes of a cluster that is to be read exactly and whose pages are not in memory.
enum class OnMiss : uint8_t {
  kWait,      // they are waited for: the answer is that of the plan
  kEstimate,  // by the deadline it is estimated like the others, and the reply says how much that
              // was
};

inline constexpr uint32_t kMissWaitUsMax = 1000000;
inline constexpr uint32_t kSinkTokensMax = 64;
inline constexpr uint32_t kWindowTokensMax = 4096;

struct Policy {
  std::string preset;
  Selector selector = Selector::kAll;
  Cut cut = Cut::kTopK;
  Estimator estimator = Estimator::kCentroid;

  // Zones: the first `sink` and the newest `window` tokens are always read exactly, as is every
  // token that no segment covers.
  uint32_t sink = 4;
  uint32_t window = 64;
  uint32_t dense_layers = 0;  // layers below this one are dense

  // kTopK: shares of the sequence's clusters, rounded up.
  double exact_share = 0.018;
  double estimated_share = 0.232;
  // kTopP: cumulative mass, 0 < p2 <= p1 <= 1.
  double p1 = 0.95;
  double p2 = 0.7;
  // kErrorBudget: target of the mean relative error, infinity for "off", 0 for dense; share of the
  // clusters that are read exactly in any case.
  double tolerance = 0.2;
  double floor = 0.01;

  // Of clusters in paged segments; zones and dense layers always wait.
  OnMiss on_miss = OnMiss::kWait;
  uint32_t miss_wait_us = 0;  // kEstimate: how long a step waits for pages

  // The policy of a layer: dense below dense_layers.
  Selector SelectorFor(uint32_t layer) const {
    return layer < dense_layers ? Selector::kAll : selector;
  }

  // All parameters of the preset as text, the form that ParsePolicy accepts.
  std::map<std::string, std::string> Parameters() const;
};

// Makes a policy from a preset's name and overrides. InvalidArgument names the preset or the
// parameter and what is allowed; Unimplemented for presets of docs/POLICIES.md that this version
// lacks.
absl::StatusOr<Policy> ParsePolicy(absl::string_view preset,
                                   const std::map<std::string, std::string>& parameters = {});

// The presets with their defaults, in the order of docs/POLICIES.md.
std::vector<Policy> PresetPolicies();

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_POLICY_H_
