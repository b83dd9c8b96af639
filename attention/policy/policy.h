// SPDX-License-Identifier: Apache-2.0
//
// Policy: how much of the KV a query reads exactly and what becomes of the rest, as a composition
// of parts (docs/POLICIES.md). A preset is a named composition with defaults; a parameter overrides
// a number or a part.
#ifndef ATTND_ATTENTION_POLICY_POLICY_H_
#define ATTND_ATTENTION_POLICY_POLICY_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/segment/index_set.h"
#include "common/model_shape.h"

namespace attnd::attention {

// What may be read exactly besides the zones: all of the middle, or candidates of it.
enum class Selector : uint8_t {
  kAll,           // every token: dense, or what a pruner chooses of them
  kNone,          // nothing: streaming
  kClusters,      // clusters, with or without a regression, ranked by what `cut` needs; with a
                  // pruner or kFeatureMap, the tokens of those with the greatest mass
  kBlocks,        // blocks of consecutive tokens, by an upper bound of their logits (Quest)
  kLabels,        // tokens, by a quarter of their channels in 4 bits (Double Sparsity)
  kBlocksLabels,  // tokens by their labels, of blocks of 64 by their bounds (AsyncTLS)
  kExhaustive,    // tokens, by their keys: reads every key (Top-K with Completion, section 5)
  kKeepSet,       // tokens that were chosen at the prompt's end (SnapKV, Ada-SnapKV)
};

// Which of the candidates each query head keeps.
enum class Pruner : uint8_t {
  kNone,
  kTopP,  // the least set with a share p of the candidates' mass by 4-bit keys (Twilight, 4.2)
};

// Of clusters: which of the ranked ones are read exactly.
enum class Cut : uint8_t {
  kTopK,         // fixed shares by mass: exact_share, then estimated_share (RetroInfer)
  kTopP,         // by cumulative mass: exact to p2, estimated to p1 (Double-P, section 4)
  kErrorBudget,  // by predicted error: what it takes to stay below tolerance, and a floor by mass
                 // (error-target)
};

// How much of the middle: a number of tokens, or percent of the middle's tokens if `percent` is
// above 0; rounded up, at least one token.
struct Budget {
  uint32_t tokens = 1024;
  double percent = 0;

  bool is_share() const { return percent > 0; }
  double share() const { return percent / 100; }
  bool operator==(const Budget&) const = default;
};
inline constexpr uint32_t kBudgetTokensMax = 1u << 30;

// How tokens that are not read exactly are estimated.
enum class Estimator : uint8_t {
  kCentroid,     // Z = s exp(a q.C), with the mean value
  kSecondOrder,  // the same times exp(d2 / 2), d2 the variance of the members' logits, and with
                 // what a regression says of the value; predicts errors
  kFeatureMap,   // of tokens: learned features' sums less what is read (Top-K with
                 // Linear-Attention Completion)
};

// kFeatureMap: for which query heads tokens that are not read are estimated; for the other heads
// they are dropped.
enum class Completion : uint8_t {
  kMaps,  // as the model's feature maps say for each head
  kOn,
  kOff,
};

// What becomes of a cluster that is to be read exactly and whose pages are not in memory.
enum class OnMiss : uint8_t {
  kWait,      // the step waits for the pages: the answer is that of the plan
  kEstimate,  // by the deadline it is estimated like the others, and the reply says how much that
              // was
};

inline constexpr uint32_t kMissWaitUsMax = 1000000;
inline constexpr uint32_t kBlocksMax = 1u << 20;  // of the first level of kBlocksLabels
inline constexpr uint32_t kSinkTokensMax = 64;
inline constexpr uint32_t kWindowTokensMax = 4096;

struct Policy {
  std::string preset;
  Selector selector = Selector::kAll;
  Pruner pruner = Pruner::kNone;
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
  // kErrorBudget: 0: the tolerance is for the mean error. Else, above 0 and below 1: the share of
  // rows (one layer, query head and query token) whose error shall be within the tolerance.
  double quantile = 0;

  // How many candidates a selector takes; kAll and kNone have no budget, and kClusters has one only
  // if its clusters' tokens are the candidates. kBlocks takes budget / block_tokens blocks, rounded
  // up; kClusters takes as many clusters as fit into the budget, but at least one. With kFeatureMap
  // a share is of all tokens that the query sees, less sink and window, and may come to no token; a
  // keep-set's share is always of the prompt's middle.
  Budget budget;
  uint32_t block_tokens = 16;  // kBlocks: 16 or 64
  // kBlocksLabels: how many blocks the first level chooses, and whether a query token takes the
  // blocks that the query token before it chose (lag 1) or its own (lag 0).
  uint32_t blocks = 128;
  uint32_t lag = 1;
  // kKeepSet: whether one ranking over the heads of a layer divides their budgets, of which each
  // head has a fifth for sure (Ada-SnapKV).
  bool adaptive = false;
  // Pruner::kTopP: 0 < p <= 1.
  double prune_p = 0.95;

  // Estimator::kFeatureMap. epsilon: features of which less than this share is left are left out,
  // 0..1.
  Completion completion = Completion::kMaps;
  double epsilon = 1e-4;

  // For clusters in paged segments; zones and dense layers always wait for their pages.
  OnMiss on_miss = OnMiss::kWait;
  uint32_t miss_wait_us = 0;  // kEstimate: how long a step waits for pages

  // The policy of a layer: dense below dense_layers.
  Selector SelectorFor(uint32_t layer) const {
    return layer < dense_layers ? Selector::kAll : selector;
  }
  // Whether the policy reads every token of a layer.
  bool DenseIn(uint32_t layer) const {
    return layer < dense_layers || (selector == Selector::kAll && pruner == Pruner::kNone);
  }

  // Whether clusters are read, estimated and dropped as a whole: `cut` says which.
  bool cuts_clusters() const {
    return selector == Selector::kClusters && pruner == Pruner::kNone &&
           estimator != Estimator::kFeatureMap;
  }
  bool completes() const {
    return estimator == Estimator::kFeatureMap && completion != Completion::kOff;
  }

  // The indexes that the policy needs of a sequence's segments (if clusters, clusters of any other
  // form serve, too, but for a quantile those with a regression alone), and whether the segments
  // may be in cluster order.
  IndexSet Indexes() const;
  bool AllowsClusterOrder() const;
  // FailedPrecondition, naming the indexes that the sequence must be opened with, if `indexes` are
  // not enough. Keep-sets are no index, and are not checked.
  absl::Status CheckIndexes(const IndexSet& indexes) const;
  // InvalidArgument, naming the parameter, if the model's shape does not allow its value.
  absl::Status CheckShape(const ModelShape& shape) const;

  bool operator==(const Policy&) const = default;

  // All parameters of the preset as text, the form that ParsePolicy accepts.
  std::map<std::string, std::string> Parameters() const;
};

// A tolerance for a share of rows, between 0 and 1, over what their predicted errors are to be kept
// below (docs/POLICIES.md, "A tolerance for a share of rows").
double ErrorFactor(double share);

// Makes a policy from a preset's name and overrides. InvalidArgument names the preset or the
// parameter and what is allowed; Unimplemented for presets of docs/POLICIES.md that this version
// lacks. A parameter that exchanges a part ("selector") is applied first: the other parameters are
// those of the exchanged parts.
absl::StatusOr<Policy> ParsePolicy(absl::string_view preset,
                                   const std::map<std::string, std::string>& parameters = {});

// The presets with their defaults, in the order of docs/POLICIES.md.
std::vector<Policy> PresetPolicies();

// A parameter and the values that it may have, in words; the parameters that `policy` has.
struct ParameterInfo {
  std::string name;
  std::string allowed;
};
std::vector<ParameterInfo> ParametersWithRanges(const Policy& policy);

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_POLICY_POLICY_H_
