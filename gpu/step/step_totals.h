// SPDX-License-Identifier: Apache-2.0
//
// StepTotals: unpacks a device's results into the rows' outputs, statistics and plans. Outputs are
// copied in one place, CopyOut and CopyLse, from the result buffer straight to the memory that the
// rows name.
#ifndef ATTND_GPU_STEP_STEP_TOTALS_H_
#define ATTND_GPU_STEP_STEP_TOTALS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/backend.h"
#include "gpu/device/device.h"
#include "gpu/step/step_writer.h"

namespace attnd::gpu {

// One thread at a time. Rows come in parts, over several waves; row numbers are the request's.
class StepTotals {
 public:
  explicit StepTotals(const attention::StepRequest& request);

  // Takes the results of the writer's wave. results: the result buffer. out_is_there: kernels have
  // written out to the rows' own memory.
  void AddWave(const StepWriter& writer, const std::byte* results, bool out_is_there);
  // Of a wave that is to run again: counts the bytes that this run has fetched. Its look-ups are
  // the last run's, which knows what earlier ones have brought.
  void AddUnfinishedWave(const StepWriter& writer, const std::byte* results);
  // Time on the device, to be shared among the wave's rows by their units.
  void AddStages(const StepWriter& writer, const StageSeconds& seconds);
  // Fills the statistics of a row whose parts have all been added.
  void FinishRow(uint32_t row) const;
  // What became of the pages that the waves have looked up; without the cache's size.
  const attention::BackendStats::PageCache& pages() const { return pages_; }
  // Plans of the rows' cluster units, in the order of waves.
  std::vector<attention::Plan>& plans() { return plans_; }

 private:
  struct Row {
    attention::RowStats stats;
    double covered_mass = 0, exact_mass = 0, missed_mass = 0;
    double error_sum = 0, error_max = 0;
    std::vector<double> kv_head_errors;  // [kv_heads] sums; empty unless the row wants them
    bool mass_known = true;
    bool error_known = true;
    uint64_t query_tokens = 0;  // of the parts that were added
  };

  // Of the part.
  void CopyOut(const StepWriter& writer, const RowPart& part, const std::byte* results) const;
  void CopyLse(const StepWriter& writer, const RowPart& part, const std::byte* results) const;
  static void AddZones(const RowPart& part, Row* totals);
  void AddUnits(const StepWriter& writer, const RowPart& part, const std::byte* results,
                Row* totals);
  static void AddLanes(const StepWriter& writer, const RowPart& part, const std::byte* results,
                       Row* totals);
  void AddPlans(const StepWriter& writer, const RowPart& part, const std::byte* results);

  const attention::StepRequest& request_;
  std::vector<Row> rows_;
  std::vector<attention::Plan> plans_;
  attention::BackendStats::PageCache pages_;
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_STEP_STEP_TOTALS_H_
