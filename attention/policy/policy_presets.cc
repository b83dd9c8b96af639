// SPDX-License-Identifier: Apache-2.0
//
// The presets: named compositions of a policy's parts, with their defaults (docs/POLICIES.md).
#include "attention/policy/policy.h"

namespace attnd::attention {

std::vector<Policy> PresetPolicies() {
  Policy dense;
  dense.preset = "dense";
  dense.selector = Selector::kAll;

  Policy streaming;
  streaming.preset = "streaming";
  streaming.selector = Selector::kNone;

  Policy quest;
  quest.preset = "quest";
  quest.selector = Selector::kBlocks;

  Policy double_sparsity;
  double_sparsity.preset = "double-sparsity";
  double_sparsity.selector = Selector::kLabels;

  Policy twilight;
  twilight.preset = "twilight";
  twilight.selector = Selector::kBlocks;
  twilight.budget = {0, 25};
  twilight.pruner = Pruner::kTopP;

  Policy asynctls;
  asynctls.preset = "asynctls";
  asynctls.selector = Selector::kBlocksLabels;
  asynctls.block_tokens = 64;

  Policy snapkv;
  snapkv.preset = "snapkv";
  snapkv.selector = Selector::kKeepSet;
  snapkv.window = 128;

  Policy ada_snapkv = snapkv;
  ada_snapkv.preset = "ada-snapkv";
  ada_snapkv.adaptive = true;

  Policy clusters_top_k;
  clusters_top_k.preset = "clusters-top-k";
  clusters_top_k.selector = Selector::kClusters;
  clusters_top_k.cut = Cut::kTopK;

  Policy double_p;
  double_p.preset = "double-p";
  double_p.selector = Selector::kClusters;
  double_p.cut = Cut::kTopP;

  Policy error_target;
  error_target.preset = "error-target";
  error_target.selector = Selector::kClusters;
  error_target.cut = Cut::kErrorBudget;
  error_target.estimator = Estimator::kSecondOrder;

  Policy topk_completion;
  topk_completion.preset = "topk-completion";
  topk_completion.selector = Selector::kExhaustive;
  topk_completion.estimator = Estimator::kFeatureMap;
  topk_completion.window = 16;
  topk_completion.budget = {0, 1};

  return {dense,  streaming,  quest,          double_sparsity, twilight,        asynctls,
          snapkv, ada_snapkv, clusters_top_k, double_p,        topk_completion, error_target};
}

}  // namespace attnd::attention
