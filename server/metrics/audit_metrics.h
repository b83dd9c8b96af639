// SPDX-License-Identifier: Apache-2.0
//
// AuditMetrics: what audits of answered rows (engine/audit/auditor.h) found, by policy.
#ifndef ATTND_SERVER_METRICS_AUDIT_METRICS_H_
#define ATTND_SERVER_METRICS_AUDIT_METRICS_H_

#include <array>
#include <functional>
#include <map>
#include <string>

#include "engine/audit/audit.h"
#include "prometheus/counter.h"
#include "prometheus/registry.h"
#include "server/metrics/finite_histogram.h"

namespace attnd::server {

// The label `policy` is a preset's name, so that clients cannot make series; there is none for
// presets that read everything, whose rows are never audited.
//
// Thread-safety: all methods may be called from any thread.
class AuditMetrics {
 public:
  // The registry must outlive it.
  explicit AuditMetrics(prometheus::Registry* registry);

  void OnAudited(const engine::AuditedRow& row);
  void OnSkipped(engine::AuditSkip why);

 private:
  // Of one policy.
  struct Histograms {
    FiniteHistogram relative_error;
    FiniteHistogram relative_error_max;
    FiniteHistogram covered_mass;
    FiniteHistogram predicted_ratio;
    FiniteHistogram tolerance_ratio;
  };

  // Constant after construction; finding allocates nothing.
  std::map<std::string, Histograms, std::less<>> policies_;
  prometheus::Counter* audited_;
  std::array<prometheus::Counter*, engine::kAuditSkips> skipped_;
};

}  // namespace attnd::server

#endif  // ATTND_SERVER_METRICS_AUDIT_METRICS_H_
