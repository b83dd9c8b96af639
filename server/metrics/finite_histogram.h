// SPDX-License-Identifier: Apache-2.0
//
// FiniteHistogram: a histogram that takes numbers only. One NaN or infinity would stay in its sum
// for as long as the process lives.
#ifndef ATTND_SERVER_METRICS_FINITE_HISTOGRAM_H_
#define ATTND_SERVER_METRICS_FINITE_HISTOGRAM_H_

#include <cmath>
#include <string>

#include "prometheus/counter.h"
#include "prometheus/family.h"
#include "prometheus/histogram.h"
#include "prometheus/registry.h"

namespace attnd::server {

// Thread-safety: Observe may be called from any thread.
class FiniteHistogram {
 public:
  using Family = prometheus::Family<prometheus::Histogram>;
  using Buckets = prometheus::Histogram::BucketBoundaries;

  FiniteHistogram() = default;
  // One of `family`; what it refuses is counted by the family's name. The registry outlives it.
  FiniteHistogram(Family* family, const prometheus::Labels& labels, const Buckets& buckets,
                  prometheus::Registry* registry)
      : histogram_(&family->Add(labels, buckets)),
        refused_(&prometheus::BuildCounter()
                      .Name("attnd_metric_values_refused_total")
                      .Help("Values that were NaN or infinite and are in no histogram, by the "
                            "histogram's name")
                      .Register(*registry)
                      .Add({{"metric", family->GetName()}})) {}

  void Observe(double value) const {
    if (!std::isfinite(value)) return refused_->Increment();
    histogram_->Observe(value);
  }

 private:
  prometheus::Histogram* histogram_ = nullptr;
  prometheus::Counter* refused_ = nullptr;
};

// Of shares of softmax mass: what steps say of it and what audits find must be comparable.
inline FiniteHistogram::Buckets MassBuckets() {
  return {0.1, 0.2, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999, 1};
}

}  // namespace attnd::server

#endif  // ATTND_SERVER_METRICS_FINITE_HISTOGRAM_H_
