// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/step_unit.h"

#include <algorithm>
#include <cmath>

#include "attention/cpu/cluster_unit.h"
#include "attention/cpu/stage_timer.h"
#include "attention/cpu/token_unit.h"
#include "glog/logging.h"

namespace attnd::attention {

// ---- what it is made of ----

StepUnit::StepUnit(const StepRequest& request, const UnitSpec& spec, size_t number,
                   StepArena* arena)
    : row_(request.rows[spec.row]),
      view_(*row_.view),
      spec_(spec),
      layer_(request.layer),
      number_(number),
      quads_(spec.tokens * QuadsPerToken(view_.shape)),
      arena_(arena) {
  LoadQueries(arena);
  states_ = NewStates(quads_, shape().value_dim, arena);
  if (spec.middle == MiddleUse::kSelected) MakeMiddle(request, arena);
}

// The heads of the row's query token `token` as floats, in quads; the lanes that no head fills are
// zero.
float* StepUnit::LoadToken(size_t token, float* quads) const {
  const size_t group = shape().group();
  const size_t dim = shape().head_dim;
  const size_t first = (token * shape().query_heads + spec_.kv_head * group) * dim;
  ToFloat(row_.query_dtype, row_.queries + first * DTypeBytes(row_.query_dtype), group * dim,
          quads);
  std::fill(quads + group * dim, quads + QuadsPerToken(shape()) * kQuad * dim, 0.0f);
  return quads;
}

void StepUnit::LoadQueries(StepArena* arena) {
  const size_t dim = shape().head_dim;
  queries_ = arena->Allocate<float>(quads_ * kQuad * dim).data();
  for (uint32_t t = 0; t < spec_.tokens; ++t) {
    LoadToken(size_t{spec_.first_token} + t, queries_ + t * QuadsPerToken(shape()) * kQuad * dim);
  }
  prepared_ = arena->Allocate<kernels::Queries>(quads_);
  for (size_t quad = 0; quad < quads_; ++quad) {
    prepared_[quad] =
        kernels::PrepareQueries(shape().dtype, queries_ + quad * kQuad * dim, shape().softmax_scale,
                                dim, arena->Allocate<float>(kernels::QueriesFloats(dim)).data());
  }
}

void StepUnit::MakeMiddle(const StepRequest& request, StepArena* arena) {
  CHECK_EQ(spec_.tokens, 1u) << "query tokens choose each for itself";
  UnitQuery query = QueryOf(request, spec_);
  query.queries = queries_;
  query.prepared = prepared_;
  if (policy().cuts_clusters()) {
    middle_ = std::make_unique<ClusterUnit>(query, arena);
    return;
  }
  if (spec_.first_token > 0 && !row_.query_only) {
    float* quads = arena->Allocate<float>(quads_ * kQuad * shape().head_dim).data();
    query.previous = LoadToken(spec_.first_token - 1, quads);
  }
  middle_ = std::make_unique<TokenUnit>(query, arena);
}

uint64_t StepUnit::WorkPerToken() const {
  return uint64_t{kQuad} * quads_ * (shape().head_dim + shape().value_dim);
}

// ---- what it reads ----

TokenRun StepUnit::RunOf(const Segment& segment, TokenRange range) const {
  TokenRun run;
  run.range = range;
  run.payload = segment.paged_payload().get();
  if (!segment.paged()) run.pages = segment.pages(layer_, spec_.kv_head);
  return run;
}

void StepUnit::AddFirstPieces(PieceList* pieces) {
  first_pieces_[0] = pieces->size();
  AddZoneAndDensePieces(pieces);
  AddTailPieces(pieces);
  first_pieces_[1] = pieces->size();
  if (middle_ != nullptr && middle_->ranks_by_keys()) AddRankedPieces(pieces);
}

// Of each segment its sink, or all of it if the middle is read densely.
void StepUnit::AddZoneAndDensePieces(PieceList* pieces) {
  const uint64_t tokens = spec_.tokens;
  const bool all = spec_.middle == MiddleUse::kRead;
  const std::span<TokenRun> runs = arena_->Allocate<TokenRun>(view_.segments.size());
  for (size_t s = 0; s < runs.size(); ++s) {
    const Segment& segment = *view_.segments[s];
    runs[s] = RunOf(segment, {0, all ? segment.tokens() : segment.unclustered()});
    report_.zone_tokens += tokens * segment.unclustered();
    if (all) report_.exact_tokens += tokens * segment.clustered();
    if (spec_.middle == MiddleUse::kDropped) {
      report_.dropped_tokens += tokens * segment.clustered();
    }
  }
  pieces->AddRuns(AllQuads(), runs);
}

// What every query token of the unit sees, then what each sees of the new tokens.
void StepUnit::AddTailPieces(PieceList* pieces) {
  const uint64_t first = row_.past_tokens + spec_.first_token;
  uint64_t shared = first;
  if (row_.query_only) {
    shared = row_.past_tokens;
  } else if (spec_.tokens == 1) {
    shared = first + 1;
  }
  pieces->AddTail(AllQuads(), {view_, layer_, spec_.kv_head, view_.tail_begin, shared});
  report_.zone_tokens += spec_.tokens * (shared - view_.tail_begin);
  if (row_.query_only || spec_.tokens == 1) return;
  const size_t quads = QuadsPerToken(shape());
  for (uint32_t t = 0; t < spec_.tokens; ++t) {
    pieces->AddTail({number_, t * quads, quads, shape().value_dim},
                    {view_, layer_, spec_.kv_head, first, first + t + 1});
    report_.zone_tokens += t + 1;
  }
}

// All tokens of the middle.
void StepUnit::AddRankedPieces(PieceList* pieces) {
  const std::span<TokenRun> runs = arena_->Allocate<TokenRun>(view_.segments.size());
  for (size_t s = 0; s < runs.size(); ++s) {
    const Segment& segment = *view_.segments[s];
    runs[s] = RunOf(segment, {segment.unclustered(), segment.tokens()});
  }
  const size_t first = pieces->size();
  pieces->AddRuns(AllQuads(), runs);
  size_t token = 0;
  for (size_t i = first; i < pieces->size(); ++i) {
    Piece& piece = (*pieces)[i];
    piece.ranked_token = token;
    for (const TokenRun& run : piece.runs) token += run.range.size();
  }
}

void StepUnit::AddChosenPieces(PieceList* pieces) {
  chosen_pieces_[0] = pieces->size();
  pieces->AddRuns(AllQuads(), middle_->runs());
  chosen_pieces_[1] = pieces->size();
  if (!middle_->follows_reading()) return;
  for (size_t i = chosen_pieces_[0]; i < chosen_pieces_[1]; ++i) {
    (*pieces)[i].reader = middle_->AddReader(arena_);
  }
}

void StepUnit::Read(Piece* piece) const {
  const std::span<const TokenRun> runs = piece->runs.first(piece->runs_now);
  for (const TokenRun& run : runs) {
    CHECK(run.payload == nullptr && run.pages != nullptr)
        << "a piece is read as far as its pages are there";
  }
  if (piece->ranked_token.has_value()) {
    middle_->ScoreKeys(*piece->ranked_token, runs);
    for (const TokenRun& run : runs) *piece->ranked_token += run.range.size();
    return;
  }
  const PageGeometry geometry(shape());
  kernels::AttendRuns(geometry, runs, prepared_.data() + piece->first_quad, piece->states.size(),
                      piece->states.data());
  if (piece->reader.has_value()) middle_->Read(*piece->reader, runs);
}

// ---- what it chooses ----

void StepUnit::Select(const PieceList& pieces) {
  uint64_t nanos = 0;
  {
    const StageTimer timer(&nanos);
    MergePieces(pieces, first_pieces_[0], first_pieces_[1]);
    static thread_local OrderScratch order;
    middle_->Select(states_, &order);
  }
  report_.nanos.select += nanos - middle_->estimate_nanos();
  report_.nanos.attend += middle_->estimate_nanos();
}

bool StepUnit::EstimatesMisses() const {
  if (policy().on_miss != OnMiss::kEstimate) return false;
  const std::span<const TokenRun> runs = middle_->runs();
  return std::any_of(runs.begin(), runs.end(),
                     [](const TokenRun& run) { return run.payload != nullptr; });
}

void StepUnit::LeaveMissing(const FetchedPages& pages) {
  CHECK(policy().cuts_clusters()) << "only clusters have an estimate to be left to";
  middle_->Demote([&](uint32_t segment, uint32_t page) {
    return pages.Find(view_.segments[segment]->paged_payload().get(), page) != nullptr;
  });
}

// ---- what comes of it ----

// Their states into the unit's, in their order.
void StepUnit::MergePieces(const PieceList& pieces, size_t begin, size_t end) {
  for (size_t i = begin; i < end; ++i) {
    const Piece& piece = pieces[i];
    CHECK(piece.runs.empty()) << "a piece is merged before all of it was read";
    for (size_t quad = 0; quad < piece.states.size(); ++quad) {
      MergeState(piece.states[quad], shape().value_dim, &states_[piece.first_quad + quad]);
    }
  }
}

void StepUnit::Merge(const PieceList& pieces) {
  const StageTimer timer(&report_.nanos.merge);
  if (middle_ != nullptr) {  // Select has merged the first pieces
    MergePieces(pieces, chosen_pieces_[0], chosen_pieces_[1]);
    middle_->AddEstimate(states_);
  } else {
    MergePieces(pieces, first_pieces_[0], first_pieces_[1]);
  }
  for (size_t quad = 0; quad < quads_; ++quad) {
    const size_t first_head = quad % QuadsPerToken(shape()) * kQuad;
    for (size_t lane = 0; lane < kQuad && first_head + lane < shape().group(); ++lane) {
      FinishLane(quad, lane);
    }
  }
}

void StepUnit::FinishLane(size_t quad, size_t lane) {
  const size_t value_dim = shape().value_dim;
  const size_t quads_per_token = QuadsPerToken(shape());
  const size_t token = spec_.first_token + quad / quads_per_token;
  const size_t head =
      size_t{spec_.kv_head} * shape().group() + quad % quads_per_token * kQuad + lane;
  const size_t slot = token * shape().query_heads + head;
  float* out = row_.out + slot * value_dim;
  NormaliseState(states_[quad], lane, value_dim, out, row_.lse + slot);
  LaneOutcome outcome;
  if (middle_ != nullptr) {
    float norm2 = 0;
    for (size_t c = 0; c < value_dim; ++c) norm2 += out[c] * out[c];
    outcome = middle_->Outcome(quad, lane, states_[quad], std::sqrt(norm2));
  }
  report_.covered_mass += outcome.covered_mass;
  report_.exact_mass += outcome.exact_mass;
  report_.error_sum += outcome.predicted_error;
  report_.error_max = std::max(report_.error_max, double{outcome.predicted_error});
  report_.missed_mass += outcome.missed_mass;
}

UnitReport StepUnit::Report() const {
  UnitReport report = report_;
  if (middle_ == nullptr) {
    report.mass_known = report.error_known = report.dropped_tokens == 0;
    return report;
  }
  report.exact_tokens = middle_->exact_tokens();
  report.estimated_tokens = middle_->estimated_tokens();
  report.dropped_tokens = middle_->dropped_tokens();
  report.missed_tokens = middle_->missed_tokens();
  report.index_rows = middle_->index_rows();
  report.clusters = middle_->clusters();
  report.mass_known = middle_->knows_mass();
  report.error_known = middle_->predicts_error();
  return report;
}

void StepUnit::ExportPlan(Plan* plan) const {
  plan->row = spec_.row;
  plan->query_token = spec_.first_token;
  plan->kv_head = spec_.kv_head;
  middle_->ExportPlan(plan);
}

}  // namespace attnd::attention
