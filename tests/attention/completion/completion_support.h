// SPDX-License-Identifier: Apache-2.0
//
// Feature maps for tests, as the code and as the oracles take them.
#ifndef ATTND_TESTS_ATTENTION_COMPLETION_COMPLETION_SUPPORT_H_
#define ATTND_TESTS_ATTENTION_COMPLETION_COMPLETION_SUPPORT_H_

#include <memory>

#include "attention/completion/feature_maps.h"
#include "common/model_shape.h"
#include "tests/attention/support.h"
#include "tests/oracle/feature_map.h"

namespace attnd::attention::test {

// Random maps whose features differ by some orders of magnitude; every other query head is
// completed.
FeatureMapParts RandomParts(const ModelShape& shape, uint32_t width, uint32_t inner,
                            Random* random);

// Maps with one feature that counts: where queries have q0 in channel 0 and keys are 0 in all
// others, phi_q . phi_k is exp(scale q.k).
FeatureMapParts KernelParts(const ModelShape& shape, float q0);

oracle::FeatureMap OracleMap(const FeatureMapParts& parts, const FeatureMapSide& side, size_t head);

}  // namespace attnd::attention::test

#endif  // ATTND_TESTS_ATTENTION_COMPLETION_COMPLETION_SUPPORT_H_
