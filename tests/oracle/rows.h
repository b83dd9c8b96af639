// SPDX-License-Identifier: Apache-2.0
//
// Plain geometry of rows of numbers, shared by the oracles that cluster.
#ifndef ATTND_TESTS_ORACLE_ROWS_H_
#define ATTND_TESTS_ORACLE_ROWS_H_

#include <cstddef>
#include <vector>

#include "tests/oracle/softmax_state.h"

namespace attnd::oracle {

double SquaredDistance(const Vector& a, const Vector& b);

// Mean of the rows numbered in members, of which there is at least one. Summed about the first of
// them: equal rows have exactly themselves as their mean, so that spreads of nothing are 0.
Vector MeanOf(const std::vector<Vector>& rows, const std::vector<std::size_t>& members);

// Mean of all rows.
Vector MeanOf(const std::vector<Vector>& rows);

// Number of the nearest centre, the lower on a tie. Lowers margin to (second - best) / best of the
// squared distances where that is less, and to 0 on a tie.
std::size_t Nearest(const Vector& row, const std::vector<Vector>& centres, double& margin);

}  // namespace attnd::oracle

#endif  // ATTND_TESTS_ORACLE_ROWS_H_
