// SPDX-License-Identifier: Apache-2.0
//
// RoundToBf16: floats to bf16 with the vectors of the machine that it runs on (Highway). All of an
// answer passes through it, between a step's end and its caller: 8 rows of Llama-3.1-8B are 32,768
// floats a layer.
#ifndef ATTND_COMMON_BF16_ROWS_H_
#define ATTND_COMMON_BF16_ROWS_H_

#include <cstddef>

namespace attnd {

// FloatToBf16 of each of `count` floats. The buffers do not overlap; `target` need not be aligned.
void RoundToBf16(const float* source, size_t count, std::byte* target);

}  // namespace attnd

#endif  // ATTND_COMMON_BF16_ROWS_H_
