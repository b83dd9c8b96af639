// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/token_unit.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "attention/kernels/kernels.h"

namespace attnd::attention {
namespace {

constexpr size_t kRounding = size_t{16} * 64;  // of the arena's separate allocations

}  // namespace

// ---- sizes ----

size_t TokenUnit::CountMiddle(const SequenceView& view) {
  size_t tokens = 0;
  for (const auto& segment : view.segments) tokens += segment->clustered();
  return tokens;
}

size_t TokenUnit::CountOf(const Policy& policy, uint64_t seen, size_t of) {
  const Budget& budget = policy.budget;
  if (!budget.is_share()) return std::min<size_t>(budget.tokens, of);
  if (policy.estimator != Estimator::kFeatureMap) return ShareOf(budget.share(), of);
  // Of all tokens, the anchors among them (Top-K with Linear-Attention Completion, section 5).
  const size_t tokens = ShareOf(budget.share(), seen), anchors = policy.sink + policy.window;
  return std::min(of, tokens > anchors ? tokens - anchors : 0);
}

std::span<const uint32_t> TokenUnit::KeptOf(const UnitQuery& query) {
  const size_t head = size_t{query.layer} * query.view->shape.kv_heads + query.kv_head;
  return query.view->state.keep->KeptBy(head);
}

TokenUnit::Sizes::Sizes(const UnitQuery& query, const BlockChoice* recalled)
    : middle(CountMiddle(*query.view)), quads(query.quads()) {
  const SequenceView& view = *query.view;
  const Policy& policy = *query.policy;
  const bool prunes = policy.pruner == Pruner::kTopP;
  bool weighs = true;      // candidates, whether they are pruned or not
  size_t chosen = middle;  // candidates that are chosen one by one: no more runs begin at them
  candidates = middle;
  switch (policy.selector) {
    case Selector::kBlocks:
      weighs = false;
      blocks = BlockSearch::CountBlocks(view, policy.block_tokens);
      block_searches = 1;
      candidates = CountOf(policy, query.seen, blocks * policy.block_tokens) + policy.block_tokens;
      chosen = prunes ? candidates : 0;
      break;
    case Selector::kBlocksLabels:
      blocks = BlockSearch::CountBlocks(view, policy.block_tokens);
      block_searches = policy.lag == 0 ? 1 : 2;
      candidates = policy.blocks;
      if (recalled != nullptr) {
        candidates =
            recalled->chosen_blocks() + recalled->CountNew(BlocksOf(view, policy.block_tokens));
      }
      candidates *= policy.block_tokens;
      chosen = CountOf(policy, query.seen, middle);
      break;
    case Selector::kLabels:
    case Selector::kExhaustive:
      chosen = CountOf(policy, query.seen, middle);
      break;
    case Selector::kKeepSet:
      weighs = false;
      candidates = chosen = KeptOf(query).size();
      break;
    case Selector::kClusters:
      weighs = false;
      clusters = CountClusters(view, query.layer, query.kv_head);
      candidates = CountOf(policy, query.seen, middle);
      for (const auto& segment : view.segments) {  // one cluster at least, whatever its size
        candidates = std::max<size_t>(candidates, segment->clustered());
      }
      chosen = prunes ? candidates : 0;
      break;
    default:
      break;
  }
  candidates = std::min(candidates, middle);
  scored = weighs || prunes ? candidates : 0;
  // Runs of chosen tokens are no more than there is room between; others are whole blocks or
  // clusters, and of each segment what is always read and what a run is cut by its end.
  ranges = std::min(chosen, middle / 2 + 1) + 3 * view.segments.size() + blocks + clusters;
}

size_t TokenUnit::Sizes::ArenaBytes(const ModelShape& shape) const {
  size_t bytes = block_searches * BlockSearch::ArenaBytes(shape, blocks);
  if (clusters > 0) bytes += ClusterRanking::ArenaBytes(shape, clusters);
  bytes += scored * (quads * (kQuad * sizeof(float) + 1) + sizeof(float) + sizeof(Fate));
  // Runs once more where they are cut into pieces.
  bytes += ranges * (2 * sizeof(Range) + 3 * sizeof(TokenRun));
  return bytes + quads * kQuad * (sizeof(float) + sizeof(double)) + kRounding;
}

size_t TokenUnit::ArenaBytes(const UnitQuery& query, uint64_t pieces) {
  const ModelShape& shape = query.view->shape;
  const size_t bytes = Sizes(query, RecalledFor(query).get()).ArenaBytes(shape);
  if (!query.policy->completes()) return bytes;
  return bytes + CompletionEstimator::ArenaBytes(*query.view) +
         pieces * CompletionEstimator::ReaderBytes(shape);
}

TokenUnit::TokenUnit(const UnitQuery& query, StepArena* arena)
    : query_(query),
      view_(*query.view),
      policy_(*query.policy),
      recalled_(RecalledFor(query)),
      sizes_(query, recalled_.get()) {
  ranges_ = arena->Allocate<Range>(sizes_.ranges);
  spare_ranges_ = arena->Allocate<Range>(sizes_.ranges);
  run_memory_ = arena->Allocate<TokenRun>(sizes_.ranges);
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
  const size_t tokens = CountOf(policy_, query_.seen, sizes_.blocks * policy_.block_tokens);
  return (tokens + policy_.block_tokens - 1) / policy_.block_tokens;
}

std::shared_ptr<const BlockChoice> TokenUnit::RecalledFor(const UnitQuery& query) {
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

// Those that the query token before this one chose, as far as they are still blocks, and those
// that were none then: that token read all that was in no segment, and nobody has searched it yet.
void TokenUnit::AddRecalledBlocks() {
  for (size_t s = 0; s < view_.segments.size(); ++s) {
    const BlockIndex index = segment(s).blocks(query_.layer, query_.kv_head, policy_.block_tokens);
    for (uint32_t block = 0; block < index.count; ++block) {
      const TokenRange tokens = index.range(block);
      if (recalled_->Chose(segment(s).first_position() + tokens.begin).value_or(true)) {
        AddRange(s, tokens);
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
    AddAlwaysRead(s, {sink, first});
    AddAlwaysRead(s, {std::max(end, first), tokens});
  }
}

// ---- tokens ----

void TokenUnit::AddRange(size_t s, TokenRange tokens) {
  ranges_[range_count_++] = {static_cast<uint32_t>(s), tokens, candidates_};
  candidates_ += tokens.size();
}

void TokenUnit::AddAlwaysRead(size_t s, TokenRange tokens) {
  if (tokens.begin >= tokens.end) return;
  ranges_[range_count_++] = {static_cast<uint32_t>(s), tokens, kAlwaysRead};
}

template <typename Search>
void TokenUnit::AddChosen(const Search& search) {
  search.ForEachChosen([&](size_t s, TokenRange tokens) { AddRange(s, tokens); });
}

void TokenUnit::AddAll() {
  for (size_t s = 0; s < view_.segments.size(); ++s) {
    AddRange(s, {segment(s).unclustered(), segment(s).tokens()});
  }
}

// The kept ones of the middle that there was.
void TokenUnit::AddKept() {
  const std::span<const uint32_t> kept = KeptOf(query_);
  auto next = kept.begin();
  for (size_t s = 0; s < view_.segments.size(); ++s) {
    const uint64_t begin = segment(s).first_position();
    const uint64_t end = std::min(view_.state.keep->ranked_tokens, segment(s).end_position());
    for (; next != kept.end() && *next < end; ++next) {
      const auto token = static_cast<uint32_t>(*next - begin);
      Range* last = range_count_ > 0 ? &ranges_[range_count_ - 1] : nullptr;
      if (last != nullptr && last->segment == s && last->tokens.end == token) {
        ++last->tokens.end;
        ++candidates_;
      } else {
        AddRange(s, {token, token + 1});
      }
    }
  }
}

// What was in no segment when the keep-set was made.
void TokenUnit::AddUnranked() {
  for (size_t s = 0; s < view_.segments.size(); ++s) {
    const uint64_t begin = segment(s).first_position();
    const uint64_t ranked =
        std::clamp(view_.state.keep->ranked_tokens, begin, segment(s).end_position());
    AddAlwaysRead(s, {std::max(static_cast<uint32_t>(ranked - begin), segment(s).unclustered()),
                      segment(s).tokens()});
  }
}

// logits_ of candidate tokens: a q.k over the channels that `kind` has.
void TokenUnit::ScoreCodes(IndexKind kind, std::span<const Range> ranges) {
  float gathered[kQuad * kernels::kDimMax];
  const float scale = view_.shape.softmax_scale;
  const size_t dim = view_.shape.head_dim;
  for (size_t quad = 0; quad < sizes_.quads; ++quad) {
    const float* queries = query_.queries + quad * kQuad * dim;
    KeyCodeIndex index;
    kernels::CodeQueries code_queries;
    code_queries.q = gathered;
    for (size_t r = 0; r < ranges.size(); ++r) {
      const Range& range = ranges[r];
      if (r == 0 || range.segment != ranges[r - 1].segment) {
        index = kind == IndexKind::kLabels
                    ? segment(range.segment).labels(query_.layer, query_.kv_head)
                    : segment(range.segment).keys4(query_.layer, query_.kv_head);
        for (size_t lane = 0; lane < kQuad; ++lane) {
          float* target = gathered + lane * index.width;
          std::fill_n(target, index.width, 0.0f);
          code_queries.q_sum[lane] = 0;
          for (size_t i = 0; i < index.channels; ++i) {
            const size_t channel = index.channel == nullptr ? i : index.channel[i];
            target[i] = queries[lane * dim + channel] * scale;
            code_queries.q_sum[lane] += target[i];
          }
        }
      }
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
  const std::span<float> score = group_score_.first(candidates_);
  std::fill(score.begin(), score.end(), 0.0f);
  for (size_t quad = 0; quad < sizes_.quads; ++quad) {
    float sum[kQuad], factor[kQuad] = {0, 0, 0, 0};
    kernels::SoftmaxQuads(LogitsOf(quad), candidates_, scale_.data() + quad * kQuad, sum);
    for (size_t lane = 0; lane < query_.LanesOf(quad); ++lane) factor[lane] = 1.0f / sum[lane];
    kernels::AddAcrossQuads(LogitsOf(quad), factor, candidates_, score.data());
  }
  const std::span<Fate> fate = fate_.first(candidates_);
  std::fill(fate.begin(), fate.end(), Fate::kDropped);
  const size_t count = std::min(CountOf(policy_, query_.seen, sizes_.middle), candidates_);
  MarkTop(score, count, order, fate);
  if (ranks_by_keys() && !pruned()) WeighOthers(fate);
  KeepOnly([&](size_t candidate) { return fate[candidate] == Fate::kExact; });
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
    ScoreCodes(IndexKind::kKeys4, ranges_.first(range_count_));
  }
  std::fill_n(lanes_.begin(), candidates_ * sizes_.quads, uint8_t{0});
  for (size_t quad = 0; quad < sizes_.quads; ++quad) {
    float sum[kQuad];
    kernels::SoftmaxQuads(LogitsOf(quad), candidates_, scale_.data() + quad * kQuad, sum);
    for (uint32_t lane = 0; lane < query_.LanesOf(quad); ++lane) {
      NucleusArgs args;
      args.weights = LogitsOf(quad) + lane;
      args.stride = kQuad;
      args.count = candidates_;
      args.p = policy_.prune_p;
      args.lane = lane;
      args.marks = lanes_.data() + quad;
      args.marks_stride = sizes_.quads;
      outside_[quad * kQuad + lane] = MarkNucleus(args, order);
    }
  }
}

// Splits the candidate ranges into those of the candidates that is_kept says, numbered anew.
template <typename IsKept>
void TokenUnit::KeepOnly(const IsKept& is_kept) {
  size_t count = 0, kept = 0;
  for (const Range& range : ranges_.first(range_count_)) {
    Range* open = nullptr;
    for (uint32_t token = range.tokens.begin; token < range.tokens.end; ++token) {
      if (!is_kept(range.candidate + (token - range.tokens.begin))) {
        open = nullptr;
        continue;
      }
      if (open == nullptr) {
        open = &spare_ranges_[count++];
        *open = {range.segment, {token, token}, kept};
      }
      ++open->tokens.end;
      ++kept;
    }
  }
  std::swap(ranges_, spare_ranges_);
  range_count_ = count;
  candidates_ = kept;
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
      ScoreCodes(IndexKind::kLabels, ranges_.first(range_count_));
      ChooseByWeight(order);
      break;
    case Selector::kLabels:
    case Selector::kExhaustive:
      AddAll();
      ChooseByWeight(order);
      break;
    case Selector::kKeepSet:
      AddKept();
      break;
    case Selector::kClusters:
      ranking_->Choose(CountOf(policy_, query_.seen, sizes_.middle), order);
      AddChosen(*ranking_);
      break;
    default:
      AddAll();
  }
  if (pruned()) Prune(order);
  if (has_blocks()) AddPartialBlocks();
  if (policy_.selector == Selector::kKeepSet) AddUnranked();
  ListRuns();
}

// Of ranges_, in order; of pruned candidates those that some head keeps.
void TokenUnit::ListRuns() {
  std::sort(ranges_.begin(), ranges_.begin() + static_cast<ptrdiff_t>(range_count_),
            [](const Range& a, const Range& b) {
              return std::pair(a.segment, a.tokens.begin) < std::pair(b.segment, b.tokens.begin);
            });
  const size_t quads = sizes_.quads;
  size_t used = 0;
  const auto add = [&](uint32_t s, uint32_t token, const uint8_t* lanes) {
    const PagedPayload* const payload = segment(s).paged_payload().get();
    const std::byte* const pages =
        payload != nullptr ? nullptr : segment(s).pages(query_.layer, query_.kv_head);
    ++exact_tokens_;
    if (used > 0) {
      TokenRun& last = run_memory_[used - 1];
      const bool same = last.payload == payload && last.pages == pages;
      const bool follows = last.lanes == nullptr ? lanes == nullptr
                                                 : lanes == last.lanes + last.range.size() * quads;
      if (same && follows && last.range.end == token) {
        ++last.range.end;
        return;
      }
    }
    run_memory_[used++] = {pages, {token, token + 1}, payload, lanes};
  };
  for (const Range& range : ranges_.first(range_count_)) {
    for (uint32_t i = 0; i < range.tokens.size(); ++i) {
      const uint32_t token = range.tokens.begin + i;
      if (!pruned() || range.candidate == kAlwaysRead) {
        add(range.segment, token, nullptr);
        continue;
      }
      const uint8_t* lanes = lanes_.data() + (range.candidate + i) * quads;
      if (std::any_of(lanes, lanes + quads, [](uint8_t mask) { return mask != 0; })) {
        add(range.segment, token, lanes);
      }
    }
  }
  runs_ = run_memory_.first(used);
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
  if (!(pruned() && candidates_ > 0) && !weighs_all()) return outcome;
  const double sum = all.sum[lane];
  const double outside = SumAt(outside_[at], scale_[at], all.max[lane]);
  outcome.covered_mass = outcome.exact_mass = static_cast<float>(sum / (sum + outside));
  return outcome;
}

void TokenUnit::ExportPlan(Plan* plan) const {
  plan->positions.resize(pruned() ? view_.shape.group() : 1);
  for (size_t list = 0; list < plan->positions.size(); ++list) {
    for (const Range& range : ranges_.first(range_count_)) {
      for (uint32_t i = 0; i < range.tokens.size(); ++i) {
        const bool masked = pruned() && range.candidate != kAlwaysRead;
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
