// SPDX-License-Identifier: Apache-2.0
//
// What a step knows of pages before it has chosen (EarlyMoment): which may still be read, and in
// which order they are likely to be. Scores are the CPU backend's own.
#ifndef ATTND_BENCH_PAGES_EARLY_RANKS_H_
#define ATTND_BENCH_PAGES_EARLY_RANKS_H_

#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "attention/backend.h"
#include "attention/cpu/cluster_scores.h"
#include "attention/cpu/step_arena.h"
#include "bench/pages/page_trace_file.h"

namespace attnd::bench {

// A cluster that may still be read.
struct EarlyCandidate {
  float score = 0;               // greater ones are likelier
  uint32_t first_page = 0;       // of its segment and KV head in the layer
  attention::TokenRange tokens;  // of the segment
};

// Lowers the candidates' pages to their places by falling score; equal ones keep their order.
// read_before: tokens that the KV head read at its last token; 0 if there was none.
void RankByOrder(std::vector<EarlyCandidate> candidates, uint64_t read_before,
                 std::span<EarlyRank> layer_ranks);
// Lowers them by their scores. cut: CutAt of the last token; infinity if there was none.
void RankByCut(const std::vector<EarlyCandidate>& candidates, float cut,
               std::span<EarlyRank> layer_ranks);
// The score down to which the candidates have `tokens` tokens or more; infinity for none of either.
float CutAt(std::vector<EarlyCandidate> candidates, uint64_t tokens);

// Of one (policy of clusters, sequence). The view and the policy outlive it.
class EarlyRanker {
 public:
  EarlyRanker(const attention::SequenceView& view, const attention::Policy& policy);

  // Ranks the pages of the plan's KV head. queries: [group][head_dim] of that KV head. plan: of a
  // step of one token; a layer's steps come in order. layer_ranks: by moment.
  void Rank(uint32_t layer, const attention::Plan& plan, std::span<const float> queries,
            const std::array<std::span<EarlyRank>, kEarlyMoments>& layer_ranks);

 private:
  // By (segment, cluster), of clusters that may still be read.
  using Scores = std::vector<std::vector<float>>;

  attention::UnitQuery MakeQuery(uint32_t layer, uint32_t kv_head, std::span<const float> queries);
  void OpenAsPlanned(const attention::Plan& plan, attention::ClusterScores* scores,
                     Scores* opened) const;
  std::vector<float> Shares(attention::ClusterScores* scores, attention::TreeLevel level) const;
  std::vector<EarlyCandidate> Candidates(const Scores& scores, uint32_t layer,
                                         const attention::Plan& plan) const;
  Scores NoScores(uint32_t layer, uint32_t kv_head) const;

  const attention::SequenceView& view_;
  const attention::Policy& policy_;
  const bool by_error_;
  attention::StepArena arena_;
  // Of a (layer, KV head)'s last token.
  struct Last {
    uint64_t read = 0;  // tokens
    float cut = std::numeric_limits<float>::infinity();
  };
  std::vector<Last> last_;  // [layers][kv_heads]
};

}  // namespace attnd::bench

#endif  // ATTND_BENCH_PAGES_EARLY_RANKS_H_
