// SPDX-License-Identifier: Apache-2.0
//
// PassStats: the statistics of a pass's rows over all its layers.
#ifndef ATTND_SERVER_CALLS_PASS_STATS_H_
#define ATTND_SERVER_CALLS_PASS_STATS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "engine/types.h"

namespace attnd::server {

// Sums counts and times over layers, and takes means of shares and errors over the layers that have
// them, as RowResult.stats says of a pass. One thread at a time.
class PassStats {
 public:
  void Start(size_t rows) { rows_.assign(rows, Row()); }
  // One layer's results, of as many rows. Rows that are not OK are skipped.
  void Add(const engine::DecodeResult& layer);
  // The result of the last layer with the statistics of all.
  engine::DecodeResult Total(const engine::DecodeResult& last) const;

 private:
  struct Mean {
    double sum = 0;
    uint32_t count = 0;
    void Add(const std::optional<float>& value);
    std::optional<float> Get() const;
  };
  struct Row {
    attention::RowStats sums;  // counts, times and the maximum
    Mean covered_mass, exact_mass, missed_mass, predicted_error;
    std::vector<Mean> kv_head_errors;
  };
  static void AddLayer(const attention::RowStats& layer, Row* row);

  std::vector<Row> rows_;
};

}  // namespace attnd::server

#endif  // ATTND_SERVER_CALLS_PASS_STATS_H_
