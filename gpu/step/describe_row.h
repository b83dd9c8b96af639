// SPDX-License-Identifier: Apache-2.0
//
// From the rows of a StepRequest, and their views, to descriptions.
#ifndef ATTND_GPU_STEP_DESCRIBE_ROW_H_
#define ATTND_GPU_STEP_DESCRIBE_ROW_H_

#include <cstdint>
#include <vector>

#include "attention/backend.h"
#include "gpu/step/row_description.h"

namespace attnd::gpu {

// Rows with equal wave shapes may share a wave.
WaveShape WaveShapeOf(const attention::StepRow& row, uint32_t layer);

// Whether the device can answer a row over segments in files: one that reads chosen tokens, or
// reads no page of a segment but the sink's. Dense rows read every page.
bool AnswersOverFiles(const attention::StepRow& row, uint32_t layer);

// What is the same for all rows over one view, in all layers.
struct HistoryDescription {
  std::vector<SegmentDescription> segments;
  uint64_t sink_segments = 0;  // of them, the first ones, behind which no token is unclustered
  uint64_t tokens = 0;         // of all segments
  uint64_t clustered = 0;
};
HistoryDescription DescribeHistory(const attention::SequenceView& view);

// history: of the row's view. The row's policy must be one that CudaBackend supports, its shape one
// that CheckShape accepts. The row's queries and the history must stay as long as the description
// is used. The row reads the history's first RowDescription::segments.size() segments.
RowDescription DescribeRow(const attention::StepRow& row, uint32_t layer,
                           const HistoryDescription& history);

}  // namespace attnd::gpu

#endif  // ATTND_GPU_STEP_DESCRIBE_ROW_H_
