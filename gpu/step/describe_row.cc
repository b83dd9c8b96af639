// SPDX-License-Identifier: Apache-2.0
#include "gpu/step/describe_row.h"

#include <glog/logging.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "attention/segment/pages.h"
#include "gpu/device/device.h"
#include "gpu/layout/index_offsets.h"

namespace attnd::gpu {
namespace {

using attention::IndexKind;
using attention::kTailBlockTokens;
using attention::Policy;
using attention::Segment;
using attention::Selector;
using attention::StepRow;

// What a row's policy comes to at a layer: a tolerance of nothing is dense, clusters of no segments
// are streaming.
UnitKind KindOf(const StepRow& row, uint32_t layer) {
  const Policy& policy = *row.policy;
  if (policy.DenseIn(layer)) return UnitKind::kDense;
  if (policy.selector == Selector::kNone) return UnitKind::kStreaming;
  // Clusters: CudaBackend::Supports lets no others in.
  if (policy.cut == attention::Cut::kErrorBudget && policy.tolerance == 0) return UnitKind::kDense;
  if (row.view->segments.empty()) return UnitKind::kStreaming;
  return row.view->indexes.Has(IndexKind::kTree) ? UnitKind::kTree : UnitKind::kClusters;
}

// Whether the tolerance is for a share of rows, and there is one.
bool HasHeadBudgets(const Policy& policy) {
  return policy.cut == attention::Cut::kErrorBudget && policy.quantile > 0 &&
         std::isfinite(policy.tolerance);
}

bool EstimatesMisses(const Policy& policy) {
  return policy.on_miss == attention::OnMiss::kEstimate;
}

CutKind CutOf(const Policy& policy) {
  switch (policy.cut) {
    case attention::Cut::kTopK:
      return CutKind::kTopK;
    case attention::Cut::kTopP:
      return CutKind::kTopP;
    case attention::Cut::kErrorBudget:
      return HasHeadBudgets(policy) ? CutKind::kHeadBudget : CutKind::kErrorBudget;
  }
  return CutKind::kTopK;
}

SegmentDescription DescribeSegment(const Segment& segment) {
  const attention::IndexLayout& layout = segment.layout();
  SegmentDescription description;
  description.tokens = segment.tokens();
  description.unclustered = segment.unclustered();
  description.max_clusters = layout.clusters.room;
  description.index_head_bytes = layout.head_bytes;
  description.pages_head_bytes = segment.pages_head_bytes();
  description.in_file = segment.paged();
  if (segment.form().indexes.Has(IndexKind::kTree)) {
    description.max_groups = layout.groups.room;
    description.tree = TreeOffsetsOf(layout);
  } else {
    description.offsets = OffsetsOf(layout);
  }
  return description;
}

bool ReadsClusters(UnitKind kind) { return kind == UnitKind::kClusters || kind == UnitKind::kTree; }

}  // namespace

bool AnswersOverFiles(const StepRow& row, uint32_t layer) {
  return KindOf(row, layer) != UnitKind::kDense;
}

WaveShape WaveShapeOf(const StepRow& row, uint32_t layer) {
  const ModelShape& shape = row.view->shape;
  WaveShape wave = {.kernel = KernelShapeOf(shape),
                    .kv_heads = shape.kv_heads,
                    .group = shape.group(),
                    .softmax_scale = shape.softmax_scale,
                    .query_dtype = row.query_dtype,
                    .reads_files = row.view->paged() && ReadsClusters(KindOf(row, layer)),
                    .miss_wait_us = std::nullopt,
                    .out_dtype = row.final_out.dtype};
  if (wave.reads_files && EstimatesMisses(*row.policy)) {
    wave.miss_wait_us = row.policy->miss_wait_us;
  }
  return wave;
}

HistoryDescription DescribeHistory(const attention::SequenceView& view) {
  HistoryDescription history;
  history.segments.reserve(view.segments.size());
  for (const auto& segment : view.segments) {
    history.segments.push_back(DescribeSegment(*segment));
    if (segment->unclustered() > 0) history.sink_segments = history.segments.size();
    history.tokens += segment->tokens();
    history.clustered += segment->clustered();
  }
  CHECK_EQ(history.tokens, view.tail_begin) << "segments cover all that the tail does not";
  return history;
}

RowDescription DescribeRow(const StepRow& row, uint32_t layer, const HistoryDescription& history) {
  const attention::SequenceView& view = *row.view;
  const Policy& policy = *row.policy;
  RowDescription description;
  description.shape = WaveShapeOf(row, layer);
  CHECK(HasKernels(description.shape.kernel)) << "the backend lets no other shape in";
  description.kind = KindOf(row, layer);
  description.cut = CutOf(policy);
  description.second_order =
      ReadsClusters(description.kind) && policy.estimator == attention::Estimator::kSecondOrder;
  description.exact_share = policy.exact_share;
  description.estimated_share = policy.estimated_share;
  description.p1 = policy.p1;
  description.p2 = policy.p2;
  description.tolerance = policy.tolerance;
  description.floor = policy.floor;
  if (HasHeadBudgets(policy)) {
    description.head_tolerance = policy.tolerance / attention::ErrorFactor(policy.quantile);
  }

  description.query_tokens = row.query_tokens;
  description.queries = row.queries;

  const uint64_t first_block_token = view.tail_begin / kTailBlockTokens * kTailBlockTokens;
  description.tail_begin = static_cast<uint32_t>(view.tail_begin - first_block_token);
  description.tail_limit = row.past_tokens - first_block_token + (row.query_only ? 0 : 1);
  description.causal = !row.query_only;

  description.segments = history.segments;
  if (description.kind == UnitKind::kStreaming) {
    description.segments = description.segments.first(history.sink_segments);
  }
  description.history_segments = history.segments.size();
  description.history_tokens = history.tokens;
  description.history_clustered = history.clustered;
  return description;
}

}  // namespace attnd::gpu
