// SPDX-License-Identifier: Apache-2.0
#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "engine/engine.h"
#include "engine/segmenter.h"

namespace attnd::engine {
namespace {

absl::Status CheckRange(const char* option, uint64_t value, uint64_t min, uint64_t max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(option, " is ", value, "; allowed are ", min, "..", max));
}

}  // namespace

absl::Status EngineOptions::Validate() const {
  ATTND_RETURN_IF_ERROR(
      CheckRange("memory_budget_bytes", memory_budget_bytes, uint64_t{1} << 20, uint64_t{1} << 50));
  ATTND_RETURN_IF_ERROR(CheckRange("max_sequences", max_sequences, 1, 1 << 20));
  ATTND_RETURN_IF_ERROR(
      CheckRange("max_sequence_tokens", max_sequence_tokens, 1, uint64_t{1} << 32));
  ATTND_RETURN_IF_ERROR(CheckRange("max_rows", max_rows, 1, 1 << 16));
  ATTND_RETURN_IF_ERROR(CheckRange("max_query_tokens", max_query_tokens, 1, 1 << 20));
  ATTND_RETURN_IF_ERROR(CheckRange("segment_tokens", segment_tokens, Segmenter::kSegmentTokensMin,
                                   attention::kSegmentTokensMax));
  return CheckRange("index_threads", index_threads, 1, 1024);
}

}  // namespace attnd::engine
