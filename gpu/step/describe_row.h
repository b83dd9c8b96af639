// SPDX-License-Identifier: Apache-2.0
//
// From the rows of a StepRequest to descriptions of rows.
#ifndef ATTND_GPU_STEP_DESCRIBE_ROW_H_
#define ATTND_GPU_STEP_DESCRIBE_ROW_H_

#include <cstdint>
#include <vector>

#include "attention/backend.h"
#include "attention/segment/segment.h"
#include "gpu/step/row_description.h"

namespace attnd::gpu {

// Rows with equal wave shapes may share a wave.
WaveShape WaveShapeOf(const attention::StepRow& row);

// The row's policy must be one that CudaBackend supports, its shape one that CheckShape accepts.
// The row's queries must stay as long as the description is used.
RowDescription DescribeRow(const attention::StepRow& row, uint32_t layer);

// The segments of RowDescription::segments.
std::vector<const attention::Segment*> SegmentsRead(const attention::StepRow& row, UnitKind kind);

}  // namespace attnd::gpu

#endif  // ATTND_GPU_STEP_DESCRIBE_ROW_H_
