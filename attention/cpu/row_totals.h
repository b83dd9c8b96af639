// SPDX-License-Identifier: Apache-2.0
//
// RowTotals: adds up the statistics and faults of a step's units, row by row.
#ifndef ATTND_ATTENTION_CPU_ROW_TOTALS_H_
#define ATTND_ATTENTION_CPU_ROW_TOTALS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "attention/backend.h"
#include "attention/cpu/unit_spec.h"

namespace attnd::attention {

// Sums over query tokens and query heads; error_max is the maximum over them.
struct MassSums {
  double covered_mass = 0;
  double exact_mass = 0;
  double error_sum = 0;
  double error_max = 0;
  double missed_mass = 0;
  // Whether the masses are of all tokens, and whether all errors are predicted.
  bool mass_known = true;
  bool error_known = true;
};

// What one unit read, estimated and left out, and what the answers of its query heads came to.
struct UnitReport : MassSums {
  // A token counts once for each query token of the unit.
  uint64_t zone_tokens = 0;
  uint64_t exact_tokens = 0;      // of the middle
  uint64_t estimated_tokens = 0;  // of the middle
  uint64_t dropped_tokens = 0;    // of the middle
  uint64_t missed_tokens = 0;     // of the estimated ones
  uint64_t ssd_tokens = 0;        // of zones and middle, if a page was read from disk for the unit
  uint64_t index_rows = 0;        // that were looked at
  uint64_t clusters = 0;          // of all segments
  StageNanos nanos;
};

// Units are summed in the order in which they are added, so that a row's statistics do not depend
// on the other rows of its step. Used by one thread, except for failed(), which any thread may ask
// while none adds.
class RowTotals {
 public:
  // Clears the statistics of all rows.
  explicit RowTotals(const StepRequest& request);

  // Notes that the row has no answer, and why. A row's first fault counts.
  void Fail(uint32_t row, const absl::Status& why);
  bool failed(uint32_t row) const { return !sums_[row].fault.ok(); }

  void Add(const UnitSpec& unit, const UnitReport& report);

  // Writes the rows' statistics and faults, after all units have been added. Returns the fault of a
  // row whose StepRow::fault is null.
  absl::Status Finish();

 private:
  struct Sums : MassSums {
    absl::Status fault;
    std::vector<double> kv_head_errors;  // [kv_heads] sums; empty unless the row wants them
  };

  const StepRequest& request_;
  std::vector<Sums> sums_;  // [rows]
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_ROW_TOTALS_H_
