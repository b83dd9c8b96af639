// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/token_sizes.h"

#include <algorithm>

#include "attention/cpu/block_search.h"
#include "attention/cpu/candidate_ranges.h"
#include "attention/cpu/cluster_ranking.h"
#include "attention/cpu/selection.h"

namespace attnd::attention {
namespace {

constexpr size_t kRounding = size_t{16} * 64;  // of the arena's separate allocations

size_t CountMiddle(const SequenceView& view) {
  size_t tokens = 0;
  for (const auto& segment : view.segments) tokens += segment->clustered();
  return tokens;
}

}  // namespace

size_t BudgetTokens(const Policy& policy, uint64_t seen, size_t of) {
  const Budget& budget = policy.budget;
  if (!budget.is_share()) return std::min<size_t>(budget.tokens, of);
  if (policy.estimator != Estimator::kFeatureMap) return ShareOf(budget.share(), of);
  // Of all tokens, the anchors among them (Top-K with Linear-Attention Completion, section 5).
  const size_t tokens = ShareOf(budget.share(), seen), anchors = policy.sink + policy.window;
  return std::min(of, tokens > anchors ? tokens - anchors : 0);
}

std::span<const uint32_t> KeptOf(const UnitQuery& query) {
  const size_t head = size_t{query.layer} * query.view->shape.kv_heads + query.kv_head;
  return query.view->state.keep->KeptBy(head);
}

std::shared_ptr<const BlockChoice> RecalledFor(const UnitQuery& query) {
  const Policy& policy = *query.policy;
  if (policy.selector != Selector::kBlocksLabels || policy.lag == 0) return nullptr;
  if (query.previous != nullptr || query.view->state.recall == nullptr) return nullptr;
  if (query.position == UnitQuery::kNoPosition || query.position == 0) return nullptr;
  auto choice = query.view->state.recall->Of(query.layer, query.kv_head, query.position - 1);
  if (choice == nullptr) return nullptr;
  // Of as many as there are or as the policy takes; else another policy's.
  const size_t all = std::min<size_t>(policy.blocks, choice->searched_blocks());
  return choice->chosen_blocks() == all ? choice : nullptr;
}

TokenSizes::TokenSizes(const UnitQuery& query, const BlockChoice* recalled)
    : middle(CountMiddle(*query.view)), candidates(middle), quads(query.quads()), chosen_(middle) {
  CountSelected(query, recalled);
  candidates = std::min(candidates, middle);
  // Candidates are weighed by labels or by keys to be chosen from, or by keys in 4 bits to be
  // pruned.
  const Selector selector = query.policy->selector;
  const bool chosen_whole = selector == Selector::kBlocks || selector == Selector::kKeepSet ||
                            selector == Selector::kClusters;
  scored = !chosen_whole || query.policy->pruner == Pruner::kTopP ? candidates : 0;
  // Ranges of chosen tokens are no more than there is room between; others are whole blocks or
  // clusters, and of each segment what is always read and what a range is cut by its end.
  const size_t segments = query.view->segments.size();
  ranges = std::min(chosen_, middle / 2 + 1) + 3 * segments + blocks + clusters;
}

void TokenSizes::CountSelected(const UnitQuery& query, const BlockChoice* recalled) {
  const Policy& policy = *query.policy;
  const bool prunes = policy.pruner == Pruner::kTopP;
  switch (policy.selector) {
    case Selector::kBlocks:
      blocks = BlockSearch::CountBlocks(*query.view, policy.block_tokens);
      block_searches = 1;
      candidates =
          BudgetTokens(policy, query.seen, blocks * policy.block_tokens) + policy.block_tokens;
      chosen_ = prunes ? candidates : 0;
      return;
    case Selector::kBlocksLabels:
      return CountBlocksAndLabels(query, recalled);
    case Selector::kLabels:
    case Selector::kExhaustive:
      chosen_ = BudgetTokens(policy, query.seen, middle);
      return;
    case Selector::kKeepSet:
      candidates = chosen_ = KeptOf(query).size();
      return;
    case Selector::kClusters:
      CountClusterTokens(query);
      chosen_ = prunes ? candidates : 0;
      return;
    default:
      return;
  }
}

void TokenSizes::CountBlocksAndLabels(const UnitQuery& query, const BlockChoice* recalled) {
  const Policy& policy = *query.policy;
  blocks = BlockSearch::CountBlocks(*query.view, policy.block_tokens);
  block_searches = policy.lag == 0 ? 1 : 2;
  candidates = policy.blocks;
  if (recalled != nullptr) {
    candidates =
        recalled->chosen_blocks() + recalled->CountNew(BlocksOf(*query.view, policy.block_tokens));
  }
  candidates *= policy.block_tokens;
  chosen_ = BudgetTokens(policy, query.seen, middle);
}

void TokenSizes::CountClusterTokens(const UnitQuery& query) {
  clusters = CountClusters(*query.view, query.layer, query.kv_head);
  candidates = BudgetTokens(*query.policy, query.seen, middle);
  for (const auto& segment : query.view->segments) {  // one cluster at least, whatever its size
    candidates = std::max<size_t>(candidates, segment->clustered());
  }
}

size_t TokenSizes::ArenaBytes(const ModelShape& shape) const {
  size_t bytes = block_searches * BlockSearch::ArenaBytes(shape, blocks);
  if (clusters > 0) bytes += ClusterRanking::ArenaBytes(shape, clusters);
  bytes += scored * (quads * (kQuad * sizeof(float) + 1) + sizeof(float) + sizeof(Fate));
  // Runs take their memory twice more where they are cut into pieces.
  bytes += CandidateRanges::ArenaBytes(ranges) + ranges * 2 * sizeof(TokenRun);
  return bytes + quads * kQuad * (sizeof(float) + sizeof(double)) + kRounding;
}

}  // namespace attnd::attention
