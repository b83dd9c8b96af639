// SPDX-License-Identifier: Apache-2.0
//
// Steps of gpu_paging: what each took, what it moved, and whether its answers are right.
#ifndef ATTND_BENCH_GPU_PAGING_STEPS_H_
#define ATTND_BENCH_GPU_PAGING_STEPS_H_

#include <cstdint>
#include <map>
#include <vector>

#include "attention/backend.h"
#include "attention/policy/policy.h"
#include "bench/gpu/step_rows.h"

namespace attnd::bench {

// Of one step.
struct PagingStep {
  double wait = 0;                                  // us, of the caller
  double device = 0, attend = 0, fetch = 0;         // us, of the GPU; fetch lies within attend
  double looked_up = 0, fetched = 0, in_place = 0;  // pages
  double host_tokens = 0;                           // chosen tokens (of a KV head) of the last two
};

// Of some steps.
struct Measured {
  std::vector<double> wait, device, attend, fetch;
  std::vector<double> looked_up, fetched, in_place, host_tokens;

  void Add(const PagingStep& step);
};

// The answers of a policy's steps, by number: the first one of each number is right, all later ones
// are compared with it, bit for bit.
class Answers {
 public:
  struct Counts {
    uint64_t compared = 0, wrong = 0;
  };
  explicit Answers(Counts* counts) : counts_(counts) {}

  // The rows' last step was this one.
  void Check(uint32_t number, const StepRows& rows);

 private:
  struct Answer {
    std::vector<float> outputs, lse;
  };

  Counts* const counts_;
  std::map<uint32_t, Answer> answers_;
};

class PagingSteps {
 public:
  // All outlive it.
  PagingSteps(StepRows* rows, const attention::Policy* policy, Answers* answers)
      : rows_(rows), policy_(policy), answers_(answers) {}

  // Runs a step and checks its answer. Ends the program if the CPU has answered a row. gpu: a
  // backend that times all its steps, and has no others.
  PagingStep Run(attention::Backend* gpu, uint32_t number);

 private:
  StepRows* const rows_;
  const attention::Policy* const policy_;
  Answers* const answers_;
};

}  // namespace attnd::bench

#endif  // ATTND_BENCH_GPU_PAGING_STEPS_H_
