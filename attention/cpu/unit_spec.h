// SPDX-License-Identifier: Apache-2.0
//
// UnitSpec: how a step is divided into units before any memory is taken for them. A unit is the
// work of one KV head for some query tokens of one row. Units do not depend on each other.
#ifndef ATTND_ATTENTION_CPU_UNIT_SPEC_H_
#define ATTND_ATTENTION_CPU_UNIT_SPEC_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/backend.h"
#include "attention/cpu/middle_unit.h"
#include "common/model_shape.h"

namespace attnd::attention {

// What a unit does with the tokens between sink and tail.
enum class MiddleUse : uint8_t {
  kRead,      // reads all of them exactly
  kDropped,   // leaves all of them out
  kSelected,  // leaves the choice to a MiddleUnit
};

struct UnitSpec {
  uint32_t row = 0;  // of the request
  uint32_t kv_head = 0;
  // Query tokens [first_token, first_token + tokens) of the row; one token if the middle is
  // selected from.
  uint32_t first_token = 0;
  uint32_t tokens = 1;
  MiddleUse middle = MiddleUse::kRead;
};

// Quads that hold the query heads of one query token and one KV head.
size_t QuadsPerToken(const ModelShape& shape);

// Tokens of a full piece of a unit with `quads` quads. More quads have longer pieces, so that the
// memory of the pieces' states stays a small share of what is read.
uint32_t PieceTokens(size_t quads);

// The units of all rows, ascending by row, query token and KV head.
std::vector<UnitSpec> DivideIntoUnits(const StepRequest& request);

// The UnitQuery of the unit's first query token, still without the numbers of its queries.
UnitQuery QueryOf(const StepRequest& request, const UnitSpec& spec);

// The most bytes of an arena that a unit takes, its pieces included.
size_t UnitBytes(const StepRequest& request, const UnitSpec& spec);

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_UNIT_SPEC_H_
