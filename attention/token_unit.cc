// SPDX-License-Identifier: Apache-2.0
#include "attention/token_unit.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "attention/kernels.h"

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

size_t TokenUnit::CountBlocks(const SequenceView& view, const Policy& policy) {
  size_t blocks = 0;
  for (const auto& segment : view.segments) {
    blocks += segment->blocks(0, 0, policy.block_tokens).count;
  }
  return blocks;
}

size_t TokenUnit::CountOf(const Budget& budget, size_t of) {
  return budget.is_share() ? ShareOf(budget.share(), of) : std::min<size_t>(budget.tokens, of);
}

TokenUnit::Sizes::Sizes(const SequenceView& view, const Policy& policy)
    : middle(CountMiddle(view)), quads((view.shape.group() + kQuad - 1) / kQuad) {
  const size_t segments = view.segments.size();
  const size_t partial_blocks = 2 * segments;
  size_t chosen = middle;  // tokens that are read in the end
  switch (policy.selector) {
    case Selector::kBlocks:
    case Selector::kBlocksLabels: {
      blocks = CountBlocks(view, policy);
      block_searches = policy.selector == Selector::kBlocks || policy.lag == 0 ? 1 : 2;
      const size_t taken = policy.selector == Selector::kBlocks
                               ? CountOf(policy.budget, blocks * policy.block_tokens)
                               : size_t{policy.blocks} * policy.block_tokens;
      candidates = std::min(middle, taken + policy.block_tokens);
      chosen = candidates;
      break;
    }
    case Selector::kLabels:
      candidates = middle;
      chosen = CountOf(policy.budget, middle);
      break;
    default:
      candidates = middle;
  }
  // Runs of chosen tokens are no more than these tokens, and no more than there is room between.
  ranges = std::min(chosen, candidates / 2 + 1) + segments + partial_blocks + blocks;
}

size_t TokenUnit::Sizes::ArenaBytes(const ModelShape& shape) const {
  const size_t searches =
      block_searches *
      (blocks * (sizeof(float) + sizeof(Fate)) +
       2 * (kernels::QueriesFloats(shape.head_dim) + kQuad * shape.head_dim) * sizeof(float) +
       kRounding);
  const size_t tokens =
      candidates * (quads * (kQuad * sizeof(float) + 1) + sizeof(float) + sizeof(Fate));
  // Runs once more where they are cut into pieces.
  return searches + tokens + ranges * (2 * sizeof(Range) + 3 * sizeof(TokenRun)) +
         quads * kQuad * (sizeof(float) + sizeof(double)) + kRounding;
}

size_t TokenUnit::ArenaBytes(const SequenceView& view, const Policy& policy) {
  return Sizes(view, policy).ArenaBytes(view.shape);
}

TokenUnit::TokenUnit(const UnitQuery& query, StepArena* arena)
    : query_(query), view_(*query.view), policy_(*query.policy), sizes_(view_, policy_) {
  ranges_ = arena->Allocate<Range>(sizes_.ranges);
  spare_ranges_ = arena->Allocate<Range>(sizes_.ranges);
  run_memory_ = arena->Allocate<TokenRun>(sizes_.ranges);
  scale_ = arena->Allocate<float>(sizes_.quads * kQuad);
  outside_ = arena->Allocate<double>(sizes_.quads * kQuad);
  logits_ = arena->Allocate<float>(sizes_.candidates * sizes_.quads * kQuad);
  group_score_ = arena->Allocate<float>(sizes_.candidates);
  fate_ = arena->Allocate<Fate>(sizes_.candidates);
  if (pruned()) lanes_ = arena->Allocate<uint8_t>(sizes_.candidates * sizes_.quads);
  if (!has_blocks()) return;
  PrepareSearch(query.queries, arena, &own_);
  if (two_levels() && policy_.lag > 0 && query.previous != nullptr) {
    PrepareSearch(query.previous, arena, &previous_);
  }
}

// ---- blocks ----

void TokenUnit::PrepareSearch(const float* queries, StepArena* arena, BlockSearch* search) const {
  const size_t dim = view_.shape.head_dim;
  // The bound is linear in the queries' positive and negative channels, so that the group's sums
  // give the group's bound; one lane of a quad each.
  const auto prepare = [&](float sign) {
    const std::span<float> sums = arena->Allocate<float>(kQuad * dim);
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (size_t quad = 0; quad < sizes_.quads; ++quad) {
      for (size_t lane = 0; lane < query_.LanesOf(quad); ++lane) {
        const float* q = queries + (quad * kQuad + lane) * dim;
        for (size_t c = 0; c < dim; ++c) sums[c] += sign * std::max(sign * q[c], 0.0f);
      }
    }
    return kernels::PrepareQueries(view_.shape.dtype, sums.data(), view_.shape.softmax_scale, dim,
                                   arena->Allocate<float>(kernels::QueriesFloats(dim)).data());
  };
  search->wanted = true;
  search->positive = prepare(1);
  search->negative = prepare(-1);
  search->scores = arena->Allocate<float>(sizes_.blocks);
  search->fate = arena->Allocate<Fate>(sizes_.blocks);
}

void TokenUnit::ScoreBlocks(size_t number, BlockSearch* search) const {
  constexpr size_t kChunk = 64;  // blocks whose quads fit the stack
  const size_t row_bytes = view_.shape.head_dim * DTypeBytes(view_.shape.dtype);
  size_t at = 0;
  for (size_t s = 0; s < number; ++s) {
    at += segment(s).blocks(query_.layer, query_.kv_head, policy_.block_tokens).count;
  }
  const BlockIndex index =
      segment(number).blocks(query_.layer, query_.kv_head, policy_.block_tokens);
  float upper[kChunk * kQuad], lower[kChunk * kQuad];
  for (size_t first = 0; first < index.count; first += kChunk) {
    const size_t n = std::min<size_t>(kChunk, index.count - first);
    const auto dot = [&](const std::byte* rows, const kernels::Queries& q, float* out) {
      kernels::DotRows(view_.shape.dtype, rows + first * row_bytes, row_bytes, n,
                       view_.shape.head_dim, q, out);
    };
    dot(index.greatest, search->positive, upper);
    dot(index.least, search->negative, lower);
    for (size_t i = 0; i < n; ++i) {
      search->scores[at + first + i] = upper[i * kQuad] + lower[i * kQuad];
    }
  }
}

void TokenUnit::ChooseBlocks(OrderScratch* order, BlockSearch* search) const {
  const size_t count = [&]() -> size_t {
    if (two_levels()) return std::min<size_t>(policy_.blocks, sizes_.blocks);
    if (policy_.budget.is_share()) return ShareOf(policy_.budget.share(), sizes_.blocks);
    const size_t wanted = (policy_.budget.tokens - 1) / policy_.block_tokens + 1;
    return std::min(wanted, sizes_.blocks);
  }();
  std::fill(search->fate.begin(), search->fate.end(), Fate::kDropped);
  MarkTop(search->scores, count, order, search->fate);
}

void TokenUnit::TakeBlocks(const BlockSearch& search) {
  size_t number = 0;
  for (size_t s = 0; s < view_.segments.size(); ++s) {
    const BlockIndex index = segment(s).blocks(query_.layer, query_.kv_head, policy_.block_tokens);
    for (uint32_t b = 0; b < index.count; ++b, ++number) {
      if (search.fate[number] == Fate::kExact) AddRange(s, index.range(b));
    }
  }
}

void TokenUnit::RememberBlocks(const BlockSearch& search) const {
  if (view_.recall == nullptr || query_.position == UnitQuery::kNoPosition) return;
  std::vector<uint64_t> chosen;
  size_t number = 0;
  for (size_t s = 0; s < view_.segments.size(); ++s) {
    const BlockIndex index = segment(s).blocks(query_.layer, query_.kv_head, policy_.block_tokens);
    for (uint32_t b = 0; b < index.count; ++b, ++number) {
      if (search.fate[number] != Fate::kExact) continue;
      chosen.push_back(segment(s).first_position() + index.range(b).begin);
    }
  }
  view_.recall->Remember(query_.layer, query_.kv_head, query_.position, chosen);
}

// Those that the query token before this one chose, as far as they are still blocks. False if that
// is not known.
bool TokenUnit::TakeRecalledBlocks() {
  if (view_.recall == nullptr || query_.position == UnitQuery::kNoPosition) return false;
  if (query_.position == 0) return false;
  const auto recalled = view_.recall->Of(query_.layer, query_.kv_head, query_.position - 1);
  if (!recalled.has_value()) return false;
  auto next = recalled->begin();
  for (size_t s = 0; s < view_.segments.size() && next != recalled->end(); ++s) {
    const BlockIndex index = segment(s).blocks(query_.layer, query_.kv_head, policy_.block_tokens);
    const uint64_t begin = segment(s).first_position();
    for (; next != recalled->end() && *next < segment(s).end_position(); ++next) {
      const uint64_t token = *next - begin;
      const bool is_block = *next >= begin && token % index.tokens == 0 &&
                            token / index.tokens >= index.first &&
                            token / index.tokens < index.first + index.count;
      const size_t room = sizes_.candidates - candidates_;
      if (!is_block || room < index.tokens) continue;
      AddRange(s, index.range(static_cast<uint32_t>(token / index.tokens) - index.first));
    }
  }
  return true;
}

void TokenUnit::SelectTwoLevels(OrderScratch* order) {
  const bool lagging = policy_.lag > 0;
  const bool remembers = lagging && view_.recall != nullptr;
  if (previous_.wanted) {
    ChooseBlocks(order, &previous_);
    TakeBlocks(previous_);
  }
  const bool recalled = previous_.wanted || (lagging && TakeRecalledBlocks());
  if (recalled && !remembers) return;
  ChooseBlocks(order, &own_);
  if (remembers) RememberBlocks(own_);
  if (!recalled) TakeBlocks(own_);
}

void TokenUnit::RememberOnly(OrderScratch* order) {
  ChooseBlocks(order, &own_);
  RememberBlocks(own_);
}

void RememberBlocksOf(const SequenceView& view, const Policy& policy, uint32_t layer,
                      uint32_t kv_head, const ObservedQueries& queries, uint32_t observed,
                      uint64_t position) {
  const ModelShape& shape = view.shape;
  StepArena arena;
  UnitQuery query;
  query.view = &view;
  query.policy = &policy;
  query.layer = layer;
  query.kv_head = kv_head;
  query.position = position;
  const size_t width = size_t{shape.group()} * shape.head_dim;
  const std::span<float> quads = arena.Allocate<float>(query.quads() * kQuad * shape.head_dim);
  std::fill(quads.begin(), quads.end(), 0.0f);
  const size_t first =
      (size_t{observed} * shape.query_heads + size_t{kv_head} * shape.group()) * shape.head_dim;
  ToFloat(queries.dtype, queries.data + first * DTypeBytes(queries.dtype), width, quads.data());
  query.queries = quads.data();
  TokenUnit unit(query, &arena);
  for (size_t item = 0; item < unit.score_items(); ++item) unit.Score(item);
  OrderScratch order;
  unit.RememberOnly(&order);
}

// Tokens of blocks that are not full: they have no bounds, and are read whatever the others do.
void TokenUnit::AddPartialBlocks() {
  for (uint32_t s = 0; s < view_.segments.size(); ++s) {
    const BlockIndex index = segment(s).blocks(query_.layer, query_.kv_head, policy_.block_tokens);
    const uint32_t tokens = segment(s).tokens(), sink = segment(s).unclustered();
    const uint32_t first = std::min(tokens, index.first * index.tokens);
    const uint32_t end = std::min(tokens, (index.first + index.count) * index.tokens);
    if (sink < first) ranges_[range_count_++] = {s, {sink, first}, kAlwaysRead};
    const uint32_t rest = std::max(end, first);
    if (rest < tokens) ranges_[range_count_++] = {s, {rest, tokens}, kAlwaysRead};
  }
}

// ---- tokens ----

void TokenUnit::AddRange(size_t s, TokenRange tokens) {
  ranges_[range_count_++] = {static_cast<uint32_t>(s), tokens, candidates_};
  candidates_ += tokens.size();
}

void TokenUnit::AddAll() {
  for (size_t s = 0; s < view_.segments.size(); ++s) {
    AddRange(s, {segment(s).unclustered(), segment(s).tokens()});
  }
}

// The kept ones of the prompt's middle, and all behind the prompt.
void TokenUnit::AddKept() {
  const size_t head = size_t{query_.layer} * view_.shape.kv_heads + query_.kv_head;
  const std::vector<uint32_t>& kept = view_.keep->positions[head];
  auto next = kept.begin();
  for (size_t s = 0; s < view_.segments.size(); ++s) {
    const uint64_t begin = segment(s).first_position();
    const uint64_t prompt = std::clamp(view_.keep->prompt_tokens, begin, segment(s).end_position());
    for (; next != kept.end() && *next < prompt; ++next) {
      const auto token = static_cast<uint32_t>(*next - begin);
      Range* last = range_count_ > 0 ? &ranges_[range_count_ - 1] : nullptr;
      if (last != nullptr && last->segment == s && last->tokens.end == token) {
        ++last->tokens.end;
        ++candidates_;
      } else {
        AddRange(s, {token, token + 1});
      }
    }
    const uint32_t behind =
        std::max(static_cast<uint32_t>(prompt - begin), segment(s).unclustered());
    if (behind < segment(s).tokens()) AddRange(s, {behind, segment(s).tokens()});
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

// Double Sparsity: the candidates with the greatest weights, softmax over the candidates for each
// head, mean over the heads.
void TokenUnit::ChooseByLabels(OrderScratch* order) {
  const std::span<float> score = group_score_.first(candidates_);
  std::fill(score.begin(), score.end(), 0.0f);
  for (size_t quad = 0; quad < sizes_.quads; ++quad) {
    float max[kQuad], sum[kQuad] = {0, 0, 0, 0}, factor[kQuad] = {0, 0, 0, 0};
    std::fill_n(max, kQuad, kNegativeInfinity);
    kernels::MaxQuads(LogitsOf(quad), candidates_, max);
    kernels::ExpQuads(LogitsOf(quad), candidates_, max, LogitsOf(quad), sum);
    for (size_t lane = 0; lane < query_.LanesOf(quad); ++lane) factor[lane] = 1.0f / sum[lane];
    kernels::AddAcrossQuads(LogitsOf(quad), factor, candidates_, score.data());
  }
  const std::span<Fate> fate = fate_.first(candidates_);
  std::fill(fate.begin(), fate.end(), Fate::kDropped);
  const size_t count = std::min(CountOf(policy_.budget, sizes_.middle), candidates_);
  MarkTop(score, count, order, fate);
  KeepOnly([&](size_t candidate) { return fate[candidate] == Fate::kExact; });
}

// Twilight: for each head the least set of candidates with a share p of their mass.
void TokenUnit::Prune(OrderScratch* order) {
  if (!scores_all() || policy_.selector == Selector::kLabels) {
    ScoreCodes(IndexKind::kKeys4, ranges_.first(range_count_));
  }
  std::fill_n(lanes_.begin(), candidates_ * sizes_.quads, uint8_t{0});
  for (size_t quad = 0; quad < sizes_.quads; ++quad) {
    float* max = scale_.data() + quad * kQuad;
    float sum[kQuad] = {0, 0, 0, 0};
    std::fill_n(max, kQuad, kNegativeInfinity);
    kernels::MaxQuads(LogitsOf(quad), candidates_, max);
    kernels::ExpQuads(LogitsOf(quad), candidates_, max, LogitsOf(quad), sum);
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
  return has_blocks() || scores_all() ? view_.segments.size() : 0;
}

uint64_t TokenUnit::ScoreRows(size_t s) const {
  return has_blocks() ? 2 * segment(s).clustered() / policy_.block_tokens
                      : segment(s).clustered() / 4;
}

void TokenUnit::Score(size_t s) {
  if (has_blocks()) {
    ScoreBlocks(s, &own_);
    if (previous_.wanted) ScoreBlocks(s, &previous_);
    return;
  }
  Range range{static_cast<uint32_t>(s), {segment(s).unclustered(), segment(s).tokens()}, 0};
  for (size_t before = 0; before < s; ++before) range.candidate += segment(before).clustered();
  ScoreCodes(policy_.selector == Selector::kLabels ? IndexKind::kLabels : IndexKind::kKeys4,
             std::span<const Range>(&range, 1));
}

void TokenUnit::Select(std::span<const QuadState> /*zones*/, OrderScratch* order) {
  switch (policy_.selector) {
    case Selector::kBlocks:
      ChooseBlocks(order, &own_);
      TakeBlocks(own_);
      break;
    case Selector::kBlocksLabels:
      SelectTwoLevels(order);
      ScoreCodes(IndexKind::kLabels, ranges_.first(range_count_));
      ChooseByLabels(order);
      break;
    case Selector::kLabels:
      AddAll();
      ChooseByLabels(order);
      break;
    case Selector::kKeepSet:
      AddKept();
      break;
    default:
      AddAll();
  }
  if (pruned()) Prune(order);
  if (has_blocks()) AddPartialBlocks();
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

bool TokenUnit::knows_mass() const {
  const bool all_weighed = policy_.selector == Selector::kAll && pruned();
  return all_weighed || dropped_tokens() == 0;
}

LaneOutcome TokenUnit::Outcome(size_t quad, size_t lane, const QuadState& all,
                               float /*output_norm*/) const {
  LaneOutcome outcome;
  if (!pruned() || !(all.sum[lane] > 0) || candidates_ == 0) return outcome;
  const size_t at = quad * kQuad + lane;
  const auto outside =
      static_cast<float>(outside_[at] * std::exp(double{scale_[at]} - all.max[lane]));
  outcome.covered_mass = outcome.exact_mass = all.sum[lane] / (all.sum[lane] + outside);
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
