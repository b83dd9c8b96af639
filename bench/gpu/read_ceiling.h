// SPDX-License-Identifier: Apache-2.0
//
// ReadCeiling: how fast kernels read a step's own pages of host memory when they do nothing else.
#ifndef ATTND_BENCH_GPU_READ_CEILING_H_
#define ATTND_BENCH_GPU_READ_CEILING_H_

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "bench/gpu/step_rows.h"

namespace attnd::bench {

class ReadCeiling {
 public:
  // Maps the rows' pages as the backend does, reads them in the ways of host_reads.h, in each of
  // these amounts (megabytes), prints what came of it, and unmaps them. No backend may have mapped
  // them. No amounts: no ceiling, and nothing is done.
  ReadCeiling(const StepRows& rows, uint32_t page_bytes, const std::vector<double>& megabytes);

  // GB a second of the fastest way, for so many bytes: between two amounts by the bytes' logarithm,
  // beyond them the nearest one's. None without a ceiling.
  std::optional<double> Of(double bytes) const;

 private:
  std::map<double, double> best_;  // GB a second by bytes
};

}  // namespace attnd::bench

#endif  // ATTND_BENCH_GPU_READ_CEILING_H_
