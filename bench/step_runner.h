// SPDX-License-Identifier: Apache-2.0
//
// StepRunner: times decode steps of one query token over a synthetic sequence, without an engine.
#ifndef ATTND_BENCH_STEP_RUNNER_H_
#define ATTND_BENCH_STEP_RUNNER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "attention/backend.h"
#include "attention/policy/policy.h"
#include "bench/synthetic_sequence.h"

namespace attnd::bench {

// NAME[:key=value,...]; ends the program for what is none.
attention::Policy ParsePolicyText(const std::string& text);

// NAME[:key=value,...], an index of clusters; a tree's keys are fields of TreeSizes. Ends the
// program for what is none.
attention::IndexSet ParseIndexText(const std::string& text);

class StepRunner {
 public:
  // Both outlive it.
  StepRunner(attention::Backend* backend, const SyntheticSequence& sequence, uint64_t tokens);

  double Seconds(const attention::Policy& policy);
  // Of the last step.
  const attention::RowStats& stats() const { return stats_; }

 private:
  attention::Backend* const backend_;
  std::vector<float> queries_, out_, lse_;
  attention::StepRow row_;
  attention::RowStats stats_;
};

}  // namespace attnd::bench

#endif  // ATTND_BENCH_STEP_RUNNER_H_
