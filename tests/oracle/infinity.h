// SPDX-License-Identifier: Apache-2.0
#ifndef ATTND_TESTS_ORACLE_INFINITY_H_
#define ATTND_TESTS_ORACLE_INFINITY_H_

#include <limits>

namespace attnd::oracle {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace attnd::oracle

#endif  // ATTND_TESTS_ORACLE_INFINITY_H_
