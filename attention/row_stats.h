// SPDX-License-Identifier: Apache-2.0
//
// RowStats: what one row's answer was made of.
#ifndef ATTND_ATTENTION_ROW_STATS_H_
#define ATTND_ATTENTION_ROW_STATS_H_

#include <cstdint>
#include <optional>
#include <vector>

namespace attnd::attention {

// Processor time that a row's work took, by stage, summed over threads; or its share of a device's
// time, in the steps where that is measured.
struct StageNanos {
  uint64_t score = 0;   // of candidates, by what the index says
  uint64_t select = 0;  // ranking and cutting
  uint64_t fetch = 0;
  uint64_t attend = 0;  // reading tokens exactly, and summing up estimates
  uint64_t merge = 0;
};

// What an answer was made of. Token counts are summed over query tokens and KV heads.
struct RowStats {
  uint64_t zone_tokens = 0;
  uint64_t exact_tokens = 0;      // of the middle
  uint64_t estimated_tokens = 0;  // of the middle
  uint64_t dropped_tokens = 0;    // of the middle
  // Shares of the softmax mass; dropped clusters count by their centroids' estimate. Absent if
  // nothing estimated the middle's mass.
  std::optional<float> covered_mass;
  std::optional<float> exact_mass;
  // Over query heads and tokens. 0 if every token was read exactly; absent if any token was
  // dropped, or estimated without the second order.
  std::optional<float> predicted_error_mean;
  std::optional<float> predicted_error_max;
  // [kv_heads] Means over each KV head's query heads and the query tokens. Empty unless the row
  // wants them, and where predicted_error_mean is absent.
  std::vector<float> kv_head_errors;
  // Share of the clusters that are estimated only because their pages were not in memory in time.
  // Absent where the masses above are absent, and unless the policy allows misses.
  std::optional<float> missed_mass;
  uint64_t missed_tokens = 0;  // of estimated_tokens
  uint64_t host_tokens = 0;    // tokens read exactly from host memory
  uint64_t ssd_tokens = 0;     // tokens read exactly whose pages the step read from disk
  uint64_t hbm_tokens = 0;     // tokens read exactly from a device's memory
  // Of cluster policies on the CPU: rows of the index that were looked at, clusters and groups of
  // clusters; and all clusters that there are. Both over query tokens and KV heads.
  uint64_t index_rows = 0;
  uint64_t clusters = 0;
  StageNanos stages;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_ROW_STATS_H_
