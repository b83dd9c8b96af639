// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/unit_spec.h"

#include <algorithm>

#include "attention/cpu/cluster_unit.h"
#include "attention/cpu/token_unit.h"
#include "attention/kernels/kernels.h"
#include "attention/kernels/softmax_state.h"
#include "attention/segment/pages.h"

namespace attnd::attention {
namespace {

constexpr uint32_t kPieceTokens = 512;  // of one quad
constexpr uint32_t kPieceTokensMax = 65536;
// Quads of a unit of several query tokens: bounds its states, and how long a piece runs.
constexpr size_t kUnitQuadsMax = 64;
constexpr size_t kCacheLineBytes = 64;

size_t StateBytes(const ModelShape& shape) {
  return sizeof(QuadState) + kQuad * shape.value_dim * sizeof(float) + 2 * kCacheLineBytes;
}

MiddleUse MiddleUseOf(const StepRow& row, uint32_t layer) {
  const Policy& policy = *row.policy;
  if (policy.DenseIn(layer)) return MiddleUse::kRead;
  if (policy.selector == Selector::kNone || row.view->segments.empty()) return MiddleUse::kDropped;
  // Segments may have come since the row was found to need no keep-set.
  if (policy.selector == Selector::kKeepSet && row.view->state.keep == nullptr)
    return MiddleUse::kRead;
  // A tolerance of nothing is dense.
  const bool by_error = policy.cuts_clusters() && policy.cut == Cut::kErrorBudget;
  return by_error && policy.tolerance == 0 ? MiddleUse::kRead : MiddleUse::kSelected;
}

bool RanksKeys(const StepRow& row, const UnitSpec& spec) {
  return spec.middle == MiddleUse::kSelected && row.policy->selector == Selector::kExhaustive;
}

// Most pieces of a unit: those of the tail, of the segments' tokens and of keys that are ranked,
// each list with a last piece that is not full, and one for each query token.
uint64_t PiecesMax(const StepRow& row, const UnitSpec& spec, size_t quads, uint64_t tail) {
  const SequenceView& view = *row.view;
  uint64_t pieces = tail / PieceTokens(quads) + 2 + spec.tokens;
  const uint64_t read = tail + (spec.middle != MiddleUse::kDropped ? view.tail_begin : 0);
  pieces += read / PieceTokens(quads) + 2;
  if (!RanksKeys(row, spec)) return pieces;
  return pieces + view.tail_begin / PieceTokens(quads) + 2 + view.segments.size();
}

}  // namespace

size_t QuadsPerToken(const ModelShape& shape) { return (shape.group() + kQuad - 1) / kQuad; }

uint32_t PieceTokens(size_t quads) {
  return static_cast<uint32_t>(
      std::clamp<uint64_t>(uint64_t{kPieceTokens} * quads, kPieceTokens, kPieceTokensMax));
}

std::vector<UnitSpec> DivideIntoUnits(const StepRequest& request) {
  std::vector<UnitSpec> specs;
  for (uint32_t r = 0; r < request.rows.size(); ++r) {
    const StepRow& row = request.rows[r];
    UnitSpec spec;
    spec.row = r;
    spec.middle = MiddleUseOf(row, request.layer);
    const bool per_token = spec.middle == MiddleUse::kSelected;
    const size_t fitting = std::max<size_t>(1, kUnitQuadsMax / QuadsPerToken(row.view->shape));
    const uint32_t tokens = per_token ? 1 : static_cast<uint32_t>(fitting);
    for (uint32_t token = 0; token < row.query_tokens; token += tokens) {
      spec.tokens = std::min(tokens, row.query_tokens - token);
      for (uint32_t head = 0; head < row.view->shape.kv_heads; ++head) {
        spec.first_token = token;
        spec.kv_head = head;
        specs.push_back(spec);
      }
    }
  }
  return specs;
}

UnitQuery QueryOf(const StepRequest& request, const UnitSpec& spec) {
  const StepRow& row = request.rows[spec.row];
  const uint64_t position = row.past_tokens + spec.first_token;
  UnitQuery query;
  query.view = row.view.get();
  query.policy = row.policy;
  query.layer = request.layer;
  query.kv_head = spec.kv_head;
  query.position = row.query_only ? UnitQuery::kNoPosition : position;
  query.seen = row.query_only ? row.past_tokens : position + 1;
  return query;
}

size_t UnitBytes(const StepRequest& request, const UnitSpec& spec) {
  const StepRow& row = request.rows[spec.row];
  const SequenceView& view = *row.view;
  const ModelShape& shape = view.shape;
  const size_t quads = spec.tokens * QuadsPerToken(shape);
  const uint64_t tail = row.past_tokens + spec.first_token + spec.tokens - view.tail_begin;
  const uint64_t pieces = PiecesMax(row, spec, quads, tail);
  const size_t query_floats = kQuad * shape.head_dim + kernels::QueriesFloats(shape.head_dim);
  size_t bytes =
      quads * (query_floats * sizeof(float) + sizeof(kernels::Queries) + kCacheLineBytes) +
      (pieces + 1) * quads * StateBytes(shape) +
      (tail / kTailBlockTokens + spec.tokens + pieces) * sizeof(TokenRun);
  // Of a paged segment a run for each page, and where clusters meet in one.
  const size_t runs_per_page = RanksKeys(row, spec) ? 5 : 3;
  for (const auto& segment : view.segments) {
    if (!segment->paged()) continue;
    bytes += runs_per_page * (segment->tokens() / kPageTokens + 2) * sizeof(TokenRun);
  }
  if (spec.middle != MiddleUse::kSelected) return bytes;
  if (row.policy->cuts_clusters()) {
    return bytes + ClusterUnit::ArenaBytes(view, request.layer, spec.kv_head, quads);
  }
  return bytes + TokenUnit::ArenaBytes(QueryOf(request, spec), pieces) +
         kQuad * quads * shape.head_dim * sizeof(float);
}

}  // namespace attnd::attention
