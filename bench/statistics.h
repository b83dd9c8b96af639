// SPDX-License-Identifier: Apache-2.0
//
// Order statistics of repeated measurements.
#ifndef ATTND_BENCH_STATISTICS_H_
#define ATTND_BENCH_STATISTICS_H_

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <vector>

namespace attnd::bench {

// The value below which `share` of the samples lie (nearest rank); samples must not be empty.
inline double Quantile(std::vector<double> samples, double share) {
  std::sort(samples.begin(), samples.end());
  const auto rank = static_cast<size_t>(share * static_cast<double>(samples.size() - 1) + 0.5);
  return samples[rank];
}

inline double Median(const std::vector<double>& samples) { return Quantile(samples, 0.5); }

inline double Mean(const std::vector<double>& samples) {
  return std::accumulate(samples.begin(), samples.end(), 0.0) / static_cast<double>(samples.size());
}

}  // namespace attnd::bench

#endif  // ATTND_BENCH_STATISTICS_H_
