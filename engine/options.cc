// SPDX-License-Identifier: Apache-2.0
#include "engine/options.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "engine/sequence/segmenter.h"
#include "storage/cache/page_cache.h"

namespace attnd::engine {
namespace {

absl::Status CheckRange(const char* option, uint64_t value, uint64_t min, uint64_t max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(option, " is ", value, "; allowed are ", min, "..", max));
}

}  // namespace

uint64_t ArchiveOptions::PageMemoryBytes(uint64_t memory_budget_bytes) const {
  if (page_memory_bytes != 0) return page_memory_bytes;
  return std::clamp(memory_budget_bytes / 8, storage::PageCacheOptions::kBytesMin,
                    uint64_t{256} << 20);
}

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
  ATTND_RETURN_IF_ERROR(CheckRange("index_threads", index_threads, 1, 1024));
  ATTND_RETURN_IF_ERROR(audit.Validate());
  if (archive.data_dir.empty()) return absl::OkStatus();
  ATTND_RETURN_IF_ERROR(CheckRange("page_readers", archive.page_readers, 1, 64));
  return CheckRange("page_memory_bytes", archive.PageMemoryBytes(memory_budget_bytes),
                    storage::PageCacheOptions::kBytesMin, memory_budget_bytes);
}

}  // namespace attnd::engine
