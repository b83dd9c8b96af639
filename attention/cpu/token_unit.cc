// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/token_unit.h"

#include <algorithm>
#include <cmath>

#include "attention/kernels/kernels.h"
#include "glog/logging.h"

namespace attnd::attention {

size_t TokenUnit::ArenaBytes(const UnitQuery& query, uint64_t pieces) {
  const ModelShape& shape = query.view->shape;
  const size_t bytes = TokenSizes(query, RecalledFor(query).get()).ArenaBytes(shape);
  if (!query.policy->completes()) return bytes;
  return bytes + CompletionEstimator::ArenaBytes(*query.view) +
         pieces * CompletionEstimator::ReaderBytes(shape);
}

TokenUnit::TokenUnit(const UnitQuery& query, StepArena* arena)
    : query_(query),
      view_(*query.view),
      policy_(*query.policy),
      recalled_(RecalledFor(query)),
      sizes_(query, recalled_.get()),
      ranges_(query, sizes_.ranges, arena) {
  scale_ = arena->Allocate<float>(sizes_.quads * kQuad);
  outside_ = arena->Allocate<double>(sizes_.quads * kQuad);
  logits_ = arena->Allocate<float>(sizes_.scored * sizes_.quads * kQuad);
  group_score_ = arena->Allocate<float>(sizes_.scored);
  fate_ = arena->Allocate<Fate>(sizes_.scored);
  if (policy_.completes()) estimator_ = std::make_unique<CompletionEstimator>(query, arena);
  if (pruned()) lanes_ = arena->Allocate<uint8_t>(sizes_.scored * sizes_.quads);
  if (policy_.selector == Selector::kClusters) ranking_.emplace(query, sizes_.clusters, arena);
  if (sizes_.block_searches == 0) return;
  own_.emplace(query, query.queries, policy_.block_tokens, sizes_.blocks, arena);
  if (sizes_.block_searches == 2 && query.previous != nullptr) {
    previous_.emplace(query, query.previous, policy_.block_tokens, sizes_.blocks, arena);
  }
}

// ---- blocks ----

size_t TokenUnit::BlocksToChoose() const {
  if (two_levels()) return std::min<size_t>(policy_.blocks, sizes_.blocks);
  if (policy_.budget.is_share() && policy_.estimator != Estimator::kFeatureMap) {
    return ShareOf(policy_.budget.share(), sizes_.blocks);
  }
  const size_t tokens = BudgetTokens(policy_, query_.seen, sizes_.blocks * policy_.block_tokens);
  return (tokens + policy_.block_tokens - 1) / policy_.block_tokens;
}

// Those that the query token before this one chose, as far as they are still blocks, and those
// that were none then: that token read all that was in no segment, and nobody has searched it yet.
void TokenUnit::AddRecalledBlocks() {
  for (size_t s = 0; s < view_.segments.size(); ++s) {
    const BlockIndex index = segment(s).blocks(query_.layer, query_.kv_head, policy_.block_tokens);
    for (uint32_t block = 0; block < index.count; ++block) {
      const TokenRange tokens = index.range(block);
      if (recalled_->Chose(segment(s).first_position() + tokens.begin).value_or(true)) {
        ranges_.Add(s, tokens);
      }
    }
  }
}

void TokenUnit::SelectTwoLevels(OrderScratch* order) {
  const bool lagging = policy_.lag > 0;
  const bool remembers = lagging && view_.state.recall != nullptr;
  if (previous_.has_value()) {
    previous_->Choose(BlocksToChoose(), order);
    AddChosen(*previous_);
  } else if (recalled_ != nullptr) {
    AddRecalledBlocks();
  }
  const bool chosen = previous_.has_value() || recalled_ != nullptr;
  if (chosen && !remembers) return;
  own_->Choose(BlocksToChoose(), order);
  if (remembers) own_->Remember();
  if (!chosen) AddChosen(*own_);
}

// Tokens of blocks that are not full: they have no bounds, and are read whatever the others do.
void TokenUnit::AddPartialBlocks() {
  for (uint32_t s = 0; s < view_.segments.size(); ++s) {
    const BlockIndex index = segment(s).blocks(query_.layer, query_.kv_head, policy_.block_tokens);
    const uint32_t tokens = segment(s).tokens(), sink = segment(s).unclustered();
    const uint32_t first = std::min(tokens, index.first * index.tokens);
    const uint32_t end = std::min(tokens, (index.first + index.count) * index.tokens);
    ranges_.AddAlwaysRead(s, {sink, first});
    ranges_.AddAlwaysRead(s, {std::max(end, first), tokens});
  }
}

// ---- tokens ----

template <typename Search>
void TokenUnit::AddChosen(const Search& search) {
  search.ForEachChosen([&](size_t s, TokenRange tokens) { ranges_.Add(s, tokens); });
}

// The kept ones of the middle that there was.
void TokenUnit::AddKept() {
  const std::span<const uint32_t> kept = KeptOf(query_);
  auto next = kept.begin();
  for (size_t s = 0; s < view_.segments.size(); ++s) {
    const uint64_t begin = segment(s).first_position();
    const uint64_t end = std::min(view_.state.keep->ranked_tokens, segment(s).end_position());
    for (; next != kept.end() && *next < end; ++next) {
      ranges_.AddToken(s, static_cast<uint32_t>(*next - begin));
    }
  }
}

// What was in no segment when the keep-set was made.
void TokenUnit::AddUnranked() {
  for (size_t s = 0; s < view_.segments.size(); ++s) {
    const uint64_t begin = segment(s).first_position();
    const uint64_t ranked =
        std::clamp(view_.state.keep->ranked_tokens, begin, segment(s).end_position());
    ranges_.AddAlwaysRead(
        s, {std::max(static_cast<uint32_t>(ranked - begin), segment(s).unclustered()),
            segment(s).tokens()});
  }
}

// The quad's queries, scaled, over the channels that the index has: gathered[4][width], and the sum
// of each.
void TokenUnit::LoadCodeQueries(const KeyCodeIndex& index, size_t quad, float* gathered,
                                float* sums) const {
  const size_t dim = view_.shape.head_dim;
  const float* const queries = query_.queries + quad * kQuad * dim;
  for (size_t lane = 0; lane < kQuad; ++lane) {
    float* const target = gathered + lane * index.width;
    std::fill_n(target, index.width, 0.0f);
    sums[lane] = 0;
    for (size_t i = 0; i < index.channels; ++i) {
      const size_t channel = index.channel == nullptr ? i : index.channel[i];
      target[i] = queries[lane * dim + channel] * view_.shape.softmax_scale;
      sums[lane] += target[i];
    }
  }
}

// logits_ of candidate tokens: a q.k over the channels that `kind` has.
void TokenUnit::ScoreCodes(IndexKind kind, std::span<const Range> ranges) {
  float gathered[kQuad * kernels::kDimMax];
  for (size_t quad = 0; quad < sizes_.quads; ++quad) {
    KeyCodeIndex index;
    kernels::CodeQueries code_queries;
    code_queries.q = gathered;
    for (size_t r = 0; r < ranges.size(); ++r) {
      const Range& range = ranges[r];
      if (r == 0 || range.segment != ranges[r - 1].segment) {
        const Segment& owner = segment(range.segment);
        index = kind == IndexKind::kLabels ? owner.labels(query_.layer, query_.kv_head)
                                           : owner.keys4(query_.layer, query_.kv_head);
        LoadCodeQueries(index, quad, gathered, code_queries.q_sum);
      }
      CHECK_LE(range.candidate + range.tokens.size(), sizes_.scored)
          << "more candidates than have logits";
      const uint32_t begin = range.tokens.begin;
      kernels::DotCodes(index.codes + size_t{begin} * (index.width / 2), index.scale + begin,
                        index.least + begin, range.tokens.size(), index.width, code_queries,
                        LogitsOf(quad) + range.candidate * kQuad);
    }
  }
}

// The keys' logits in place of labels'.
void TokenUnit::ScoreKeys(size_t first, std::span<const TokenRun> runs) {
  const PageGeometry geometry(view_.shape);
  for (const TokenRun& run : runs) {
    CHECK_LE(first + run.range.size(), sizes_.scored) << "more candidates than have logits";
    for (uint32_t token = run.range.begin; token < run.range.end;) {
      const uint32_t page_end = (token / kPageTokens + 1) * kPageTokens;
      const uint32_t count = std::min(run.range.end, page_end) - token;
      for (size_t quad = 0; quad < sizes_.quads; ++quad) {
        kernels::DotRows(geometry.dtype, run.pages + geometry.KeyOffset(token),
                         geometry.key_row_bytes, count, geometry.head_dim, query_.prepared[quad],
                         LogitsOf(quad) + first * kQuad);
      }
      first += count;
      token += count;
    }
  }
}

// Double Sparsity, and the exhaustive selector: the candidates with the greatest weights, softmax
// over the candidates for each head, mean over the heads.
void TokenUnit::ChooseByWeight(OrderScratch* order) {
  const size_t candidates = ranges_.candidates();
  CHECK_LE(candidates, sizes_.scored) << "more candidates than have logits";
  const std::span<float> score = group_score_.first(candidates);
  std::fill(score.begin(), score.end(), 0.0f);
  for (size_t quad = 0; quad < sizes_.quads; ++quad) {
    float sum[kQuad], factor[kQuad] = {0, 0, 0, 0};
    kernels::SoftmaxQuads(LogitsOf(quad), candidates, scale_.data() + quad * kQuad, sum);
    for (size_t lane = 0; lane < query_.LanesOf(quad); ++lane) factor[lane] = 1.0f / sum[lane];
    kernels::AddAcrossQuads(LogitsOf(quad), factor, candidates, score.data());
  }
  const std::span<Fate> fate = fate_.first(candidates);
  std::fill(fate.begin(), fate.end(), Fate::kDropped);
  const size_t count = std::min(BudgetTokens(policy_, query_.seen, sizes_.middle), candidates);
  MarkTop(score, count, order, fate);
  if (ranks_by_keys() && !pruned()) WeighOthers(fate);
  ranges_.KeepOnly([&](size_t candidate) { return fate[candidate] == Fate::kExact; });
}

void TokenUnit::WeighOthers(std::span<const Fate> fate) {
  for (size_t quad = 0; quad < sizes_.quads; ++quad) {
    double* outside = outside_.data() + quad * kQuad;
    std::fill_n(outside, kQuad, 0.0);
    for (size_t i = 0; i < fate.size(); ++i) {
      if (fate[i] == Fate::kExact) continue;
      for (size_t lane = 0; lane < kQuad; ++lane) {
        outside[lane] += LogitsOf(quad)[i * kQuad + lane];
      }
    }
  }
}

// Twilight: for each head the least set of candidates with a share p of their mass.
void TokenUnit::Prune(OrderScratch* order) {
  if (policy_.selector != Selector::kAll) {  // there they have been scored by these already
    ScoreCodes(IndexKind::kKeys4, ranges_.ranges());
  }
  const size_t candidates = ranges_.candidates();
  CHECK_LE(candidates, sizes_.scored) << "more candidates than have logits";
  std::fill_n(lanes_.begin(), candidates * sizes_.quads, uint8_t{0});
  for (size_t quad = 0; quad < sizes_.quads; ++quad) {
    float sum[kQuad];
    kernels::SoftmaxQuads(LogitsOf(quad), candidates, scale_.data() + quad * kQuad, sum);
    for (uint32_t lane = 0; lane < query_.LanesOf(quad); ++lane) {
      NucleusArgs args;
      args.weights = LogitsOf(quad) + lane;
      args.stride = kQuad;
      args.count = candidates;
      args.p = policy_.prune_p;
      args.lane = lane;
      args.marks = lanes_.data() + quad;
      args.marks_stride = sizes_.quads;
      outside_[quad * kQuad + lane] = MarkNucleus(args, order);
    }
  }
}

// ---- the unit ----

size_t TokenUnit::score_items() const {
  return has_blocks() || ranking_.has_value() || scores_all() ? view_.segments.size() : 0;
}

uint64_t TokenUnit::ScoreRows(size_t s) const {
  if (has_blocks()) return 2 * segment(s).clustered() / policy_.block_tokens;
  if (ranking_.has_value()) {
    return segment(s).clusters(query_.layer, query_.kv_head).clusters;
  }
  return segment(s).clustered() / 4;
}

void TokenUnit::Score(size_t s) {
  if (ranking_.has_value()) return ranking_->Score(s);
  if (has_blocks()) {
    own_->Score(s);
    if (previous_.has_value()) previous_->Score(s);
    return;
  }
  Range range{static_cast<uint32_t>(s), {segment(s).unclustered(), segment(s).tokens()}, 0};
  for (size_t before = 0; before < s; ++before) range.candidate += segment(before).clustered();
  ScoreCodes(policy_.selector == Selector::kLabels ? IndexKind::kLabels : IndexKind::kKeys4,
             std::span<const Range>(&range, 1));
}

void TokenUnit::Select(std::span<const QuadState> /*zones*/, OrderScratch* order) {
  if (estimates()) estimator_->Prepare();
  switch (policy_.selector) {
    case Selector::kBlocks:
      own_->Choose(BlocksToChoose(), order);
      AddChosen(*own_);
      break;
    case Selector::kBlocksLabels:
      SelectTwoLevels(order);
      ScoreCodes(IndexKind::kLabels, ranges_.ranges());
      ChooseByWeight(order);
      break;
    case Selector::kLabels:
    case Selector::kExhaustive:
      ranges_.AddAll();
      ChooseByWeight(order);
      break;
    case Selector::kKeepSet:
      AddKept();
      break;
    case Selector::kClusters:
      ranking_->Choose(BudgetTokens(policy_, query_.seen, sizes_.middle), order);
      AddChosen(*ranking_);
      break;
    default:
      ranges_.AddAll();
  }
  if (pruned()) Prune(order);
  if (has_blocks()) AddPartialBlocks();
  if (policy_.selector == Selector::kKeepSet) AddUnranked();
  ListRuns();
}

// Of pruned candidates those that some head keeps.
void TokenUnit::ListRuns() {
  const size_t masks = ranges_.candidates() * sizes_.quads;
  runs_ = ranges_.ListRuns(pruned() ? lanes_.first(masks) : std::span<uint8_t>());
  for (const TokenRun& run : runs_) exact_tokens_ += run.range.size();
  CHECK_LE(exact_tokens_, sizes_.middle) << "a token of the middle is read twice";
}

void TokenUnit::Read(size_t reader, std::span<const TokenRun> runs) {
  for (const TokenRun& run : runs) estimator_->reader(reader).Add(run);
}

void TokenUnit::AddEstimate(std::span<QuadState> states) const {
  if (estimates()) estimator_->Estimate(sizes_.middle, states);
}

bool TokenUnit::knows_mass() const {
  const bool all_completed = estimator_ != nullptr && estimator_->completes_all();
  return weighs_all() || all_completed || unread_tokens() == 0;
}

LaneOutcome TokenUnit::Outcome(size_t quad, size_t lane, const QuadState& all,
                               float /*output_norm*/) const {
  LaneOutcome outcome;
  const size_t at = quad * kQuad + lane;
  if (!(all.sum[lane] > 0) || (unread_tokens() == 0 && !pruned())) return outcome;
  if (estimator_ != nullptr && estimator_->completes(at)) {
    // As a float, which is what the states were merged by.
    const auto log_mass = static_cast<float>(estimator_->log_mass(at));
    const double estimated = SumAt(1, log_mass, all.max[lane]) / all.sum[lane];
    outcome.exact_mass = static_cast<float>(std::max(0.0, 1 - estimated));
    return outcome;
  }
  if (!(pruned() && ranges_.candidates() > 0) && !weighs_all()) return outcome;
  const double sum = all.sum[lane];
  const double outside = SumAt(outside_[at], scale_[at], all.max[lane]);
  outcome.covered_mass = outcome.exact_mass = static_cast<float>(sum / (sum + outside));
  return outcome;
}

void TokenUnit::ExportPlan(Plan* plan) const {
  plan->positions.resize(pruned() ? view_.shape.group() : 1);
  for (size_t list = 0; list < plan->positions.size(); ++list) {
    for (const Range& range : ranges_.ranges()) {
      for (uint32_t i = 0; i < range.tokens.size(); ++i) {
        const bool masked = pruned() && range.candidate != CandidateRanges::kAlwaysRead;
        const size_t at = (range.candidate + i) * sizes_.quads + list / kQuad;
        if (masked && (lanes_[at] >> list % kQuad & 1) == 0) continue;
        const Segment& owner = segment(range.segment);
        const auto places = owner.positions(query_.layer, query_.kv_head);
        plan->positions[list].push_back(owner.first_position() + places[range.tokens.begin + i]);
      }
    }
    std::sort(plan->positions[list].begin(), plan->positions[list].end());
  }
}

}  // namespace attnd::attention
