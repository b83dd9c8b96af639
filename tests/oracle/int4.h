// SPDX-License-Identifier: Apache-2.0
//
// Asymmetric 4-bit codes of a row of numbers, such as one token's key (docs/POLICIES.md, "Labels").
//
// How the definition is read where its words leave a choice:
//  - min and max are of the row that is coded: of a label's channels alone, not of the whole key.
//  - code = round((x - min) / scale), half away from zero, held within 0..15; scale = (max - min) /
//    15. A row whose scale is 0, before or after rounding to float32, has codes 0 and stands for
//    its min.
//  - kFloat32 rounds min and scale to the nearest float32, each once and from double; the codes are
//    made with the rounded ones. Arithmetic in float32 throughout may give a scale of one bit less
//    or more, and another code where Int4Row::margin is small.
//  - The dequantised number is min + scale * code in double.
#ifndef ATTND_TESTS_ORACLE_INT4_H_
#define ATTND_TESTS_ORACLE_INT4_H_

#include <vector>

#include "tests/oracle/softmax_state.h"

namespace attnd::oracle {

enum class Int4Rounding { kNone, kFloat32 };  // of min and scale

struct Int4Row {
  double min = 0.0;
  double scale = 0.0;
  std::vector<int> codes;  // [size], 0..15
  // The closest call: the least distance of (x - min) / scale to a half, 0.5 at most.
  double margin = 0.5;

  Vector Dequantised() const;
};

// At least one number, all finite.
Int4Row EncodeInt4(const Vector& row, Int4Rounding rounding = Int4Rounding::kNone);

// The codes of a row under a min and a scale that are given, such as those that an engine stores.
Int4Row EncodeInt4With(const Vector& row, double min, double scale);

// Each row by itself, coded and dequantised again.
std::vector<Vector> ThroughInt4(const std::vector<Vector>& rows,
                                Int4Rounding rounding = Int4Rounding::kNone);

}  // namespace attnd::oracle

#endif  // ATTND_TESTS_ORACLE_INT4_H_
