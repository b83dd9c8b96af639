// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/cpu_step.h"

#include <algorithm>
#include <cmath>

#include "attention/cpu/stage_timer.h"
#include "attention/kernels/kernels.h"
#include "common/status.h"

namespace attnd::attention {
namespace {

constexpr uint32_t kPieceTokens = 512;  // of one quad
constexpr uint32_t kPieceTokensMax = 65536;
// Quads of a unit of several query tokens: bounds its states, and how long an item runs.
constexpr size_t kUnitQuadsMax = 64;
constexpr size_t kCacheLineBytes = 64;

// A longer piece for more quads keeps the states' memory a small share of what is read. It depends
// on the row alone.
uint32_t PieceTokens(size_t quads) {
  return static_cast<uint32_t>(
      std::clamp<uint64_t>(uint64_t{kPieceTokens} * quads, kPieceTokens, kPieceTokensMax));
}

size_t QuadsPerToken(const ModelShape& shape) { return (shape.group() + kQuad - 1) / kQuad; }

size_t StateBytes(const ModelShape& shape) {
  return sizeof(QuadState) + kQuad * shape.value_dim * sizeof(float) + 2 * kCacheLineBytes;
}

}  // namespace

CpuStep::CpuStep(const StepRequest& request, StepArena* arena)
    : request_(request), arena_(arena), totals_(request.rows.size()) {
  ListUnits();
}

void CpuStep::ListUnits() {
  for (uint32_t r = 0; r < request_.rows.size(); ++r) {
    const StepRow& row = request_.rows[r];
    const Policy& policy = *row.policy;
    UnitSpec spec;
    spec.row = r;
    spec.middle = MiddleOf(policy, row);
    const bool per_token = spec.middle == Middle::kSelected;
    const size_t fitting = std::max<size_t>(1, kUnitQuadsMax / QuadsPerToken(row.view->shape));
    const uint32_t tokens = per_token ? 1 : static_cast<uint32_t>(fitting);
    for (uint32_t token = 0; token < row.query_tokens; token += tokens) {
      spec.tokens = std::min(tokens, row.query_tokens - token);
      for (uint32_t head = 0; head < row.view->shape.kv_heads; ++head) {
        spec.first_token = token;
        spec.kv_head = head;
        specs_.push_back(spec);
      }
    }
  }
}

CpuStep::Middle CpuStep::MiddleOf(const Policy& policy, const StepRow& row) const {
  if (policy.DenseIn(request_.layer)) return Middle::kRead;
  if (policy.selector == Selector::kNone || row.view->segments.empty()) return Middle::kDropped;
  // Segments may have come since the row was found to need no keep-set.
  if (policy.selector == Selector::kKeepSet && row.view->state.keep == nullptr)
    return Middle::kRead;
  // A tolerance of nothing is dense.
  const bool by_error = policy.cuts_clusters() && policy.cut == Cut::kErrorBudget;
  return by_error && policy.tolerance == 0 ? Middle::kRead : Middle::kSelected;
}

size_t CpuStep::UnitBytes(const UnitSpec& spec) const {
  const StepRow& row = request_.rows[spec.row];
  const SequenceView& view = *row.view;
  const ModelShape& shape = view.shape;
  const size_t quads = spec.tokens * QuadsPerToken(shape);
  const uint64_t tail = row.past_tokens + spec.first_token + spec.tokens - view.tail_begin;
  // Segments' pieces and the tail's, each with a last one not full, and one for each query token.
  uint64_t pieces = tail / PieceTokens(quads) + 2 + spec.tokens;
  uint64_t tokens = tail;
  if (spec.middle != Middle::kDropped) tokens += view.tail_begin;
  pieces += tokens / PieceTokens(quads) + 2;
  const bool ranks =
      spec.middle == Middle::kSelected && row.policy->selector == Selector::kExhaustive;
  if (ranks) pieces += view.tail_begin / PieceTokens(quads) + 2 + view.segments.size();
  const size_t query_floats = kQuad * shape.head_dim + kernels::QueriesFloats(shape.head_dim);
  size_t bytes =
      quads * (query_floats * sizeof(float) + sizeof(kernels::Queries) + kCacheLineBytes) +
      (pieces + 1) * quads * StateBytes(shape) +
      (tail / kTailBlockTokens + spec.tokens + pieces) * sizeof(TokenRun);
  for (const auto& segment :
       view.segments) {  // a run for each page, and where clusters meet in one
    if (segment->paged())
      bytes += size_t{ranks ? 5u : 3u} * (segment->tokens() / kPageTokens + 2) * sizeof(TokenRun);
  }
  if (spec.middle == Middle::kSelected) {
    bytes += row.policy->cuts_clusters()
                 ? ClusterUnit::ArenaBytes(view, request_.layer, spec.kv_head, quads)
                 : TokenUnit::ArenaBytes(QueryOf(spec), pieces) +
                       kQuad * quads * shape.head_dim * sizeof(float);
  }
  return bytes;
}

// What a unit is asked, without its queries; of several query tokens, the first.
UnitQuery CpuStep::QueryOf(const UnitSpec& spec) const {
  const StepRow& row = request_.rows[spec.row];
  const uint64_t position = row.past_tokens + spec.first_token;
  UnitQuery query;
  query.view = row.view.get();
  query.policy = row.policy;
  query.layer = request_.layer;
  query.kv_head = spec.kv_head;
  query.position = row.query_only ? UnitQuery::kNoPosition : position;
  query.seen = row.query_only ? row.past_tokens : position + 1;
  return query;
}

bool CpuStep::NextWave(size_t scratch_bytes) {
  units_.clear();
  cluster_units_.clear();
  token_units_.clear();
  selecting_.clear();
  pieces_.clear();
  score_items_.clear();
  pages_.Clear();
  pins_.reset();
  arena_->Reset();
  size_t bytes = 0;
  while (next_spec_ < specs_.size()) {
    bytes += UnitBytes(specs_[next_spec_]);
    if (bytes > scratch_bytes && !units_.empty()) break;
    AddUnit(specs_[next_spec_++]);
  }
  return !units_.empty();
}

void CpuStep::AddUnit(const UnitSpec& spec) {
  const size_t number = units_.size();
  Unit& unit = units_.emplace_back();
  unit.spec = spec;
  const SequenceView& view = ViewOf(unit);
  unit.quads = spec.tokens * QuadsPerToken(view.shape);
  LoadQueries(&unit);
  unit.states = NewStates(number, unit.quads);
  unit.read_pieces[0] = pieces_.size();
  AddZoneAndDensePieces(number);
  unit.read_pieces[1] = pieces_.size();
  if (spec.middle != Middle::kSelected) return;
  unit.middle = AddMiddle(unit);
  selecting_.push_back(number);
  if (unit.middle->ranks_by_keys()) AddRankedPieces(number);
  for (size_t i = 0; i < unit.middle->score_items(); ++i) score_items_.push_back({number, i, 0});
}

MiddleUnit* CpuStep::AddMiddle(const Unit& unit) {
  const StepRow& row = RowOf(unit);
  const ModelShape& shape = row.view->shape;
  UnitQuery query = QueryOf(unit.spec);
  query.queries = unit.queries;
  query.prepared = unit.prepared;
  if (row.policy->cuts_clusters()) {
    return &cluster_units_.emplace_back(query, arena_);
  }
  if (unit.spec.first_token > 0 && !row.query_only) {
    float* quads = arena_->Allocate<float>(unit.quads * kQuad * shape.head_dim).data();
    query.previous = LoadToken(row, unit.spec.kv_head, unit.spec.first_token - 1, quads);
  }
  return &token_units_.emplace_back(query, arena_);
}

// A query token's heads as floats, in quads; the lanes that no head fills are zero.
float* CpuStep::LoadToken(const StepRow& row, uint32_t kv_head, size_t token, float* quads) const {
  const ModelShape& shape = row.view->shape;
  const size_t group = shape.group();
  const size_t dim = shape.head_dim;
  const size_t first = (token * shape.query_heads + kv_head * group) * dim;
  ToFloat(row.query_dtype, row.queries + first * DTypeBytes(row.query_dtype), group * dim, quads);
  std::fill(quads + group * dim, quads + QuadsPerToken(shape) * kQuad * dim, 0.0f);
  return quads;
}

void CpuStep::LoadQueries(Unit* unit) {
  const StepRow& row = RowOf(*unit);
  const ModelShape& shape = row.view->shape;
  const size_t dim = shape.head_dim;
  unit->queries = arena_->Allocate<float>(unit->quads * kQuad * dim).data();
  for (uint32_t t = 0; t < unit->spec.tokens; ++t) {
    LoadToken(row, unit->spec.kv_head, size_t{unit->spec.first_token} + t,
              unit->queries + t * QuadsPerToken(shape) * kQuad * dim);
  }
  unit->prepared = arena_->Allocate<kernels::Queries>(unit->quads);
  for (size_t quad = 0; quad < unit->quads; ++quad) {
    unit->prepared[quad] = kernels::PrepareQueries(
        shape.dtype, unit->queries + quad * kQuad * dim, shape.softmax_scale, dim,
        arena_->Allocate<float>(kernels::QueriesFloats(dim)).data());
  }
}

void CpuStep::AddZoneAndDensePieces(size_t number) {
  Unit& unit = units_[number];
  const StepRow& row = RowOf(unit);
  const SequenceView& view = *row.view;
  const uint32_t tokens = unit.spec.tokens;
  const std::span<TokenRun> runs = arena_->Allocate<TokenRun>(view.segments.size());
  size_t used = 0;
  for (const auto& segment : view.segments) {
    const bool all = unit.spec.middle == Middle::kRead;
    TokenRun& run = runs[used++];
    run = {};
    run.range = {0, all ? segment->tokens() : segment->unclustered()};
    run.payload = segment->paged_payload().get();
    if (!segment->paged()) run.pages = segment->pages(request_.layer, unit.spec.kv_head);
    unit.zone_tokens += uint64_t{tokens} * segment->unclustered();
    if (all) unit.middle_exact_tokens += uint64_t{tokens} * segment->clustered();
    if (unit.spec.middle == Middle::kDropped) {
      unit.middle_dropped_tokens += uint64_t{tokens} * segment->clustered();
    }
  }
  AddRuns(number, runs, 0, unit.quads);
  // What every query token of the unit sees, then what each sees of the new tokens.
  const uint64_t first = row.past_tokens + unit.spec.first_token;
  const uint64_t shared = row.query_only ? row.past_tokens : tokens == 1 ? first + 1 : first;
  AddTail(number, view.tail_begin, shared, 0, unit.quads);
  unit.zone_tokens += tokens * (shared - view.tail_begin);
  if (row.query_only || tokens == 1) return;
  const size_t quads = QuadsPerToken(view.shape);
  for (uint32_t t = 0; t < tokens; ++t) {
    AddTail(number, first, first + t + 1, t * quads, quads);
    unit.zone_tokens += t + 1;
  }
}

// Runs one after another, in pieces of PieceTokens; those of paged segments page by page, and cut
// where the kernel's blocks of tokens end, so that a piece can be read in parts without a bit of
// difference.
void CpuStep::AddRuns(size_t number, std::span<const TokenRun> runs, size_t first_quad,
                      size_t quads) {
  const uint32_t step = PieceTokens(quads);
  uint64_t tokens = 0, page_ends = 0;
  for (const TokenRun& run : runs) {
    tokens += run.range.size();
    if (run.payload != nullptr) page_ends += uint64_t{2} * (run.range.size() / kPageTokens + 1);
  }
  const std::span<TokenRun> cut =
      arena_->Allocate<TokenRun>(runs.size() + tokens / step + page_ends);
  size_t used = 0, first = 0;
  uint32_t room = step;
  for (const TokenRun& run : runs) {
    for (uint32_t begin = run.range.begin; begin < run.range.end;) {
      uint32_t end = std::min(run.range.end, begin + room);
      if (run.payload != nullptr) {
        const uint32_t in_block = kernels::kRowBlock - (step - room) % kernels::kRowBlock;
        end = std::min({end, (begin / kPageTokens + 1) * kPageTokens, begin + in_block});
      }
      const uint8_t* const lanes =
          run.lanes == nullptr ? nullptr : run.lanes + (begin - run.range.begin) * quads;
      cut[used++] = {run.pages, {begin, end}, run.payload, lanes};
      room -= end - begin;
      begin = end;
      if (room > 0) continue;
      AddPiece(number, cut.subspan(first, used - first), first_quad, quads);
      first = used;
      room = step;
    }
  }
  if (used > first) AddPiece(number, cut.subspan(first, used - first), first_quad, quads);
}

// Positions [begin, end) of the tail: one run for each tail block, pieces of whole blocks.
void CpuStep::AddTail(size_t number, uint64_t begin, uint64_t end, size_t first_quad,
                      size_t quads) {
  const Unit& unit = units_[number];
  const SequenceView& view = ViewOf(unit);
  const uint64_t first_block = view.tail_begin / kTailBlockTokens;
  const uint64_t step = PieceTokens(quads);
  while (begin < end) {
    const uint64_t piece_end = std::min(end, (begin / step + 1) * step);
    const size_t runs = (piece_end - 1) / kTailBlockTokens - begin / kTailBlockTokens + 1;
    const std::span<TokenRun> list = arena_->Allocate<TokenRun>(runs);
    for (TokenRun& run : list) {
      const uint64_t block = begin / kTailBlockTokens;
      const uint64_t run_end = std::min(piece_end, (block + 1) * kTailBlockTokens);
      run = {};
      run.pages = view.tail[block - first_block]->pages(request_.layer, unit.spec.kv_head);
      run.range = {static_cast<uint32_t>(begin % kTailBlockTokens),
                   static_cast<uint32_t>(run_end - block * kTailBlockTokens)};
      begin = run_end;
    }
    AddPiece(number, list, first_quad, quads);
  }
}

void CpuStep::AddPiece(size_t number, std::span<TokenRun> runs, size_t first_quad, size_t quads) {
  const Unit& unit = units_[number];
  const uint64_t page_bytes = PageGeometry(ViewOf(unit).shape).page_bytes();
  uint64_t tokens = 0;
  for (TokenRun& run : runs) {
    tokens += run.range.size();
    if (run.payload == nullptr) continue;
    if (there_.empty()) {
      pages_.Add(pieces_.size(), {request_.layer, unit.spec.kv_head, page_bytes}, &run,
                 tokens % kernels::kRowBlock == 0);
      continue;
    }
    const uint32_t page = run.range.begin / kPageTokens;
    while (there_.front().payload != run.payload || there_.front().page != page) {
      there_ = there_.subspan(1);
    }
    CountRead(number, run, !there_.front().was_there);
    PointAt(there_.front().data, &run);
  }
  Piece& piece = pieces_.emplace_back();
  piece.unit = number;
  piece.runs = runs;
  piece.runs_now = runs.size();
  piece.first_quad = first_quad;
  piece.states = NewStates(number, quads);
}

std::span<QuadState> CpuStep::NewStates(size_t number, size_t quads) {
  const size_t value_dim = ViewOf(units_[number]).shape.value_dim;
  const std::span<QuadState> states = arena_->Allocate<QuadState>(quads);
  for (QuadState& state : states) {
    state.values = arena_->Allocate<float>(kQuad * value_dim).data();
    ClearState(value_dim, &state);
  }
  return states;
}

// All tokens of the middle, for the unit to rank.
void CpuStep::AddRankedPieces(size_t number) {
  const Unit& unit = units_[number];
  const SequenceView& view = ViewOf(unit);
  const std::span<TokenRun> runs = arena_->Allocate<TokenRun>(view.segments.size());
  for (size_t s = 0; s < runs.size(); ++s) {
    const Segment& segment = *view.segments[s];
    runs[s] = {};
    runs[s].range = {segment.unclustered(), segment.tokens()};
    runs[s].payload = segment.paged_payload().get();
    if (!segment.paged()) runs[s].pages = segment.pages(request_.layer, unit.spec.kv_head);
  }
  const size_t first = pieces_.size();
  AddRuns(number, runs, 0, unit.quads);
  size_t token = 0;
  for (size_t i = first; i < pieces_.size(); ++i) {
    pieces_[i].ranked = true;
    pieces_[i].token = token;
    for (const TokenRun& run : pieces_[i].runs) token += run.range.size();
  }
}

void CpuStep::AddExactPieces(size_t number) {
  Unit& unit = units_[number];
  unit.exact_pieces[0] = pieces_.size();
  AddRuns(number, unit.middle->runs(), 0, unit.quads);
  unit.exact_pieces[1] = pieces_.size();
  if (!unit.middle->follows_reading()) return;
  for (size_t i = unit.exact_pieces[0]; i < unit.exact_pieces[1]; ++i) {
    pieces_[i].followed = true;
    pieces_[i].reader = unit.middle->AddReader(arena_);
  }
}

void CpuStep::Prepare(Stage stage) {
  next_item_ = 0;
  switch (stage) {
    case Stage::kAttend:
      next_item_ = pieces_.size();
      estimating_.clear();
      next_estimating_ = 0;
      for (const size_t unit : selecting_) {
        if (EstimatesMisses(units_[unit])) {
          estimating_.push_back(unit);
        } else {
          AddExactPieces(unit);
        }
      }
      return;
    case Stage::kAttendThere:
      next_item_ = pieces_.size();
      return;
    case Stage::kRead:
    case Stage::kSelect:
    case Stage::kMerge:
      return;
  }
}

absl::StatusOr<CpuStep::Items> CpuStep::NextItems(Stage stage) {
  const size_t begin = next_item_;
  switch (stage) {
    case Stage::kRead:
      // Scores read no pages: they go with the last pieces.
      return BringPieces(pieces_.size() + score_items_.size());
    case Stage::kAttend:
      return BringPieces(pieces_.size());
    case Stage::kAttendThere:
      return BringWhatIsThere();
    case Stage::kSelect:
      next_item_ = selecting_.size();
      break;
    case Stage::kMerge:
      next_item_ = units_.size();
      break;
  }
  return Items{begin, next_item_};
}

uint64_t CpuStep::Work(Stage stage, const Items& items) const {
  uint64_t work = 0;
  const auto per_token = [&](size_t number) {
    const ModelShape& shape = ViewOf(units_[number]).shape;
    return uint64_t{kQuad} * units_[number].quads * (shape.head_dim + shape.value_dim);
  };
  switch (stage) {
    case Stage::kRead:
    case Stage::kAttend:
    case Stage::kAttendThere:
      for (size_t i = items.begin; i < std::min(items.end, pieces_.size()); ++i) {
        for (const TokenRun& run : pieces_[i].runs.first(pieces_[i].runs_now)) {
          work += run.range.size() * per_token(pieces_[i].unit);
        }
      }
      if (stage != Stage::kRead || items.end <= pieces_.size()) return work;
      [[fallthrough]];
    case Stage::kSelect:
      for (const ScoreItem& item : score_items_) {
        work += units_[item.unit].middle->ScoreRows(item.item) * per_token(item.unit);
      }
      return work;
    case Stage::kMerge:
      for (size_t i = 0; i < pieces_.size(); ++i) work += per_token(pieces_[i].unit);
      return work;
  }
  return work;
}

void CpuStep::RunItem(Stage stage, size_t item) {
  switch (stage) {
    case Stage::kRead:
      if (item < pieces_.size()) {
        RunPiece(&pieces_[item]);
      } else {
        ScoreItem& score = score_items_[item - pieces_.size()];
        const StageTimer timer(&score.nanos);
        units_[score.unit].middle->Score(score.item);
      }
      return;
    case Stage::kSelect:
      return SelectUnit(&units_[selecting_[item]]);
    case Stage::kAttend:
    case Stage::kAttendThere:
      return RunPiece(&pieces_[item]);
    case Stage::kMerge:
      return MergeUnit(&units_[item]);
  }
}

void CpuStep::RunPiece(Piece* piece) {
  const StageTimer timer(&piece->nanos);
  if (!totals_[units_[piece->unit].spec.row].fault.ok()) return;
  ReadRuns(piece, piece->runs.first(piece->runs_now));
  piece->runs = piece->runs.subspan(piece->runs_now);
  piece->runs_now = piece->runs.size();
}

void CpuStep::ReadRuns(Piece* piece, std::span<const TokenRun> runs) {
  const Unit& unit = units_[piece->unit];
  if (piece->ranked) {
    unit.middle->ScoreKeys(piece->token, runs);
    for (const TokenRun& run : runs) piece->token += run.range.size();
    return;
  }
  const PageGeometry geometry(ViewOf(unit).shape);
  kernels::AttendRuns(geometry, runs, unit.prepared.data() + piece->first_quad,
                      piece->states.size(), piece->states.data());
  if (piece->followed) unit.middle->Read(piece->reader, runs);
}

void CpuStep::SelectUnit(Unit* unit) {
  uint64_t nanos = 0;
  {
    const StageTimer timer(&nanos);
    ChooseFor(unit);
  }
  unit->nanos.select += nanos - unit->middle->estimate_nanos();
  unit->nanos.attend += unit->middle->estimate_nanos();
}

void CpuStep::ChooseFor(Unit* unit) {
  const size_t value_dim = ViewOf(*unit).shape.value_dim;
  for (size_t i = unit->read_pieces[0]; i < unit->read_pieces[1]; ++i) {
    for (size_t quad = 0; quad < unit->quads; ++quad) {
      MergeState(pieces_[i].states[quad], value_dim, &unit->states[quad]);
    }
  }
  static thread_local OrderScratch order;
  unit->middle->Select(unit->states, &order);
}

void CpuStep::MergeUnit(Unit* unit) {
  const StageTimer timer(&unit->nanos.merge);
  const ModelShape& shape = ViewOf(*unit).shape;
  const bool selects = unit->middle != nullptr;  // its zones SelectUnit merged
  const size_t* pieces = selects ? unit->exact_pieces : unit->read_pieces;
  for (size_t i = pieces[0]; i < pieces[1]; ++i) {
    const Piece& piece = pieces_[i];
    for (size_t quad = 0; quad < piece.states.size(); ++quad) {
      MergeState(piece.states[quad], shape.value_dim, &unit->states[piece.first_quad + quad]);
    }
  }
  if (selects) unit->middle->AddEstimate(unit->states);
  for (size_t quad = 0; quad < unit->quads; ++quad) {
    const size_t first_head = quad % QuadsPerToken(shape) * kQuad;
    for (size_t lane = 0; lane < kQuad && first_head + lane < shape.group(); ++lane) {
      FinishLane(unit, quad, lane);
    }
  }
}

void CpuStep::FinishLane(Unit* unit, size_t quad, size_t lane) {
  const StepRow& row = RowOf(*unit);
  const ModelShape& shape = row.view->shape;
  const size_t quads_per_token = QuadsPerToken(shape);
  const size_t token = unit->spec.first_token + quad / quads_per_token;
  const size_t head =
      size_t{unit->spec.kv_head} * shape.group() + quad % quads_per_token * kQuad + lane;
  const size_t slot = token * shape.query_heads + head;
  float* out = row.out + slot * shape.value_dim;
  NormaliseState(unit->states[quad], lane, shape.value_dim, out, row.lse + slot);
  LaneOutcome outcome;
  if (unit->middle != nullptr) {
    float norm2 = 0;
    for (size_t c = 0; c < shape.value_dim; ++c) norm2 += out[c] * out[c];
    outcome = unit->middle->Outcome(quad, lane, unit->states[quad], std::sqrt(norm2));
  }
  unit->covered_mass += outcome.covered_mass;
  unit->exact_mass += outcome.exact_mass;
  unit->error_sum += outcome.predicted_error;
  unit->error_max = std::max(unit->error_max, double{outcome.predicted_error});
  unit->missed_mass += outcome.missed_mass;
}

void CpuStep::FinishWave() {
  for (const Piece& piece : pieces_) units_[piece.unit].nanos.attend += piece.nanos;
  for (const ScoreItem& item : score_items_) units_[item.unit].nanos.score += item.nanos;
  for (const Unit& unit : units_) {
    RowStats& stats = *RowOf(unit).stats;
    RowTotals& totals = totals_[unit.spec.row];
    uint64_t exact = unit.middle_exact_tokens;
    uint64_t dropped = unit.middle_dropped_tokens;
    if (unit.middle != nullptr) {
      exact += unit.middle->exact_tokens();
      dropped += unit.middle->dropped_tokens();
      stats.estimated_tokens += unit.middle->estimated_tokens();
      stats.missed_tokens += unit.middle->missed_tokens();
      if (!unit.middle->predicts_error()) totals.error_known = false;
      if (!unit.middle->knows_mass()) totals.mass_known = false;
      if (request_.plans != nullptr) {
        Plan& plan = request_.plans->emplace_back();
        plan.row = unit.spec.row;
        plan.query_token = unit.spec.first_token;
        plan.kv_head = unit.spec.kv_head;
        unit.middle->ExportPlan(&plan);
      }
    } else if (dropped > 0) {
      totals.mass_known = totals.error_known = false;
    }
    stats.zone_tokens += unit.zone_tokens;
    stats.exact_tokens += exact;
    stats.dropped_tokens += dropped;
    stats.ssd_tokens += unit.ssd_tokens;
    stats.host_tokens += unit.zone_tokens + exact - unit.ssd_tokens;
    stats.stages.fetch += unit.nanos.fetch;
    stats.stages.score += unit.nanos.score;
    stats.stages.select += unit.nanos.select;
    stats.stages.attend += unit.nanos.attend;
    stats.stages.merge += unit.nanos.merge;
    totals.covered_mass += unit.covered_mass;
    totals.exact_mass += unit.exact_mass;
    totals.error_sum += unit.error_sum;
    totals.error_max = std::max(totals.error_max, unit.error_max);
    totals.missed_mass += unit.missed_mass;
  }
}

absl::Status CpuStep::FinishRows() {
  for (size_t r = 0; r < request_.rows.size(); ++r) {
    const StepRow& row = request_.rows[r];
    const RowTotals& totals = totals_[r];
    if (row.fault != nullptr) *row.fault = totals.fault;
    const double lanes = double{1} * row.query_tokens * row.view->shape.query_heads;
    if (totals.mass_known) {
      row.stats->covered_mass = static_cast<float>(totals.covered_mass / lanes);
      row.stats->exact_mass = static_cast<float>(totals.exact_mass / lanes);
      if (row.policy->on_miss == OnMiss::kEstimate) {
        row.stats->missed_mass = static_cast<float>(totals.missed_mass / lanes);
      }
    }
    if (totals.error_known) {
      row.stats->predicted_error_mean = static_cast<float>(totals.error_sum / lanes);
      row.stats->predicted_error_max = static_cast<float>(totals.error_max);
    }
    if (row.fault == nullptr) ATTND_RETURN_IF_ERROR(totals.fault);
  }
  return absl::OkStatus();
}

}  // namespace attnd::attention
