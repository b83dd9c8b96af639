// SPDX-License-Identifier: Apache-2.0
//
// Crosses of cases and dtypes for parametrised tests. Under a sanitizer a case takes seconds, so
// the cross is smaller there, unless ATTND_FULL is set: a release build with the test runs all of
// it.
#pragma once

#include <cstddef>
#include <span>
#include <tuple>
#include <vector>

#include "common/dtype.h"

namespace attnd::test {

// Every case with every dtype. Address sanitizer: every case with one dtype, which changes from
// case to case, as bounds depend on the shape and on the width of elements, not on both at once.
// Thread sanitizer: the first dtype with the cases whose numbers are `for_threads`, as no race
// depends on a dtype.
template <typename Case>
std::vector<std::tuple<Case, DType>> Cross(
    std::span<const Case> cases, const std::vector<DType>& dtypes,
    [[maybe_unused]] const std::vector<size_t>& for_threads = {0}) {
  std::vector<std::tuple<Case, DType>> cross;
#if defined(__SANITIZE_THREAD__) && !defined(ATTND_FULL)
  for (const size_t i : for_threads) cross.emplace_back(cases[i], dtypes[0]);
#elif defined(__SANITIZE_ADDRESS__) && !defined(ATTND_FULL)
  for (size_t i = 0; i < cases.size(); ++i) cross.emplace_back(cases[i], dtypes[i % dtypes.size()]);
#else
  for (const Case& one : cases) {
    for (const DType dtype : dtypes) cross.emplace_back(one, dtype);
  }
#endif
  return cross;
}

// How often a random test, or one of a race, is repeated: a third of `all` under a sanitizer.
constexpr int Repetitions(int all) {
#if (defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)) && !defined(ATTND_FULL)
  return all / 3;
#else
  return all;
#endif
}

}  // namespace attnd::test
