// SPDX-License-Identifier: Apache-2.0
//
// MeasureIndexing: how long this machine takes to index a KV head.
#ifndef ATTND_CTL_INDEX_TIME_H_
#define ATTND_CTL_INDEX_TIME_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "attention/segment/index_set.h"
#include "common/model_shape.h"

namespace attnd::ctl {

struct IndexTime {
  uint32_t tokens = 0;  // of one KV head that were indexed
  double seconds = 0;   // that it took, on one thread
};

// Builds a segment of one KV head of the shape, of random keys and values, as the server does on
// the CPU: 1,024 tokens, then twice as many as long as that takes about a second in all, up to
// tokens_max >= 1024. Unimplemented for indexes that need a model's files; ResourceExhausted.
absl::StatusOr<IndexTime> MeasureIndexing(const ModelShape& shape,
                                          const attention::IndexSet& indexes, uint32_t tokens_max);

}  // namespace attnd::ctl

#endif  // ATTND_CTL_INDEX_TIME_H_
