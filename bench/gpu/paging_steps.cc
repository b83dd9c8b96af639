// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu/paging_steps.h"

#include <cstring>

#include "absl/status/status.h"
#include "bench/support.h"

namespace attnd::bench {
namespace {

using attention::BackendStats;

// The time that the device took for steps so far, by stage.
double DeviceMicros(const BackendStats& stats) {
  return 1e6 *
         (stats.score_seconds + stats.select_seconds + stats.attend_seconds + stats.merge_seconds);
}

// The bits, so that NaN is like itself and the zeros are two.
bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace

void Measured::Add(const PagingStep& step) {
  wait.push_back(step.wait);
  device.push_back(step.device);
  attend.push_back(step.attend);
  fetch.push_back(step.fetch);
  looked_up.push_back(step.looked_up);
  fetched.push_back(step.fetched);
  in_place.push_back(step.in_place);
  host_tokens.push_back(step.host_tokens);
}

void Answers::Check(uint32_t number, const StepRows& rows) {
  const auto [right, is_first] = answers_.try_emplace(number, Answer{rows.outputs(), rows.lse()});
  if (is_first) return;
  ++counts_->compared;
  const bool same =
      SameBits(right->second.outputs, rows.outputs()) && SameBits(right->second.lse, rows.lse());
  counts_->wrong += same ? 0 : 1;
}

PagingStep PagingSteps::Run(attention::Backend* gpu, uint32_t number) {
  const BackendStats before = gpu->stats();
  PagingStep step;
  step.wait = rows_->Run(gpu, *policy_, number);
  const BackendStats after = gpu->stats();
  if (after.fallback_steps > before.fallback_steps) {
    Must(absl::InternalError("the CPU answered for the GPU"));
  }
  answers_->Check(number, *rows_);
  const auto count = [](uint64_t a, uint64_t b) { return static_cast<double>(a - b); };
  step.device = DeviceMicros(after) - DeviceMicros(before);
  step.attend = 1e6 * (after.attend_seconds - before.attend_seconds);
  step.fetch = 1e6 * (after.fetch_seconds - before.fetch_seconds);
  step.looked_up = count(after.cache.lookups, before.cache.lookups);
  step.fetched = count(after.cache.fetched, before.cache.fetched);
  step.in_place = count(after.cache.in_place, before.cache.in_place);
  step.host_tokens = count(after.cache.host_tokens, before.cache.host_tokens);
  return step;
}

}  // namespace attnd::bench
