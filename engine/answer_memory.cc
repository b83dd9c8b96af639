// SPDX-License-Identifier: Apache-2.0
#include "engine/answer_memory.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace attnd::engine {

absl::StatusOr<AnswerBuffers> AnswerSpans::operator()(const AnswerExtents& extents) const {
  const uint64_t out = extents.out_floats(), lse = extents.lse_floats();
  if (out <= buffers_.out.size() && lse <= buffers_.lse.size()) {
    return AnswerBuffers{buffers_.out.first(out), buffers_.lse.first(lse)};
  }
  return absl::InvalidArgumentError(absl::StrCat("the caller's memory has ", buffers_.out.size(),
                                                 " floats for out and ", buffers_.lse.size(),
                                                 " for lse; the answer needs ", out, " and ", lse));
}

absl::StatusOr<AnswerBuffers> AnswerVectors::operator()(const AnswerExtents& extents) const {
  out_.resize(extents.out_floats());
  lse_.resize(extents.lse_floats());
  return AnswerBuffers{out_, lse_};
}

}  // namespace attnd::engine
