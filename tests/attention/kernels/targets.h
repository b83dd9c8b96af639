// SPDX-License-Identifier: Apache-2.0
//
// EveryTarget: a fixture that runs its tests on each instruction set that both this processor and
// the kernels have.
#ifndef ATTND_TESTS_ATTENTION_KERNELS_TARGETS_H_
#define ATTND_TESTS_ATTENTION_KERNELS_TARGETS_H_

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "attention/kernels/kernels.h"

namespace attnd::attention::test {

// Makes the kernels use `target`, or the best one if it is 0.
inline void UseTarget(int64_t target) {
  hwy::SetSupportedTargetsForTest(target);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

// The name of the target that the kernels really run.
inline std::string KernelTarget(int64_t target) {
  UseTarget(target);
  const std::string name = kernels::TargetName();
  UseTarget(0);
  return name;
}

// The processor's targets for which the kernels were compiled: those that answer with their own
// name.
inline std::vector<int64_t> HighwayTargets() {
  std::vector<int64_t> targets;
  for (int64_t rest = hwy::SupportedTargets(); rest != 0; rest &= rest - 1) {
    const int64_t target = rest & -rest;
    if (KernelTarget(target) == hwy::TargetName(target)) targets.push_back(target);
  }
  return targets;
}

inline std::string TargetName(const testing::TestParamInfo<int64_t>& info) {
  return hwy::TargetName(info.param);
}

class EveryTarget : public testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override {
    UseTarget(GetParam());
    ASSERT_STREQ(kernels::TargetName(), hwy::TargetName(GetParam()));
  }
  void TearDown() override { UseTarget(0); }
};

}  // namespace attnd::attention::test

#endif  // ATTND_TESTS_ATTENTION_KERNELS_TARGETS_H_
