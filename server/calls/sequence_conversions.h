// SPDX-License-Identifier: Apache-2.0
//
// Messages of the calls that open and list sequences and presets (conversions.h says what is
// checked here).
#ifndef ATTND_SERVER_CALLS_SEQUENCE_CONVERSIONS_H_
#define ATTND_SERVER_CALLS_SEQUENCE_CONVERSIONS_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "attention/policy/policy.h"
#include "attnd/v1/attnd.pb.h"
#include "engine/types.h"
#include "server/options/policy_catalog.h"

namespace attnd::server {

inline constexpr size_t kFingerprintBytesMax = 256;
inline constexpr uint32_t kShardsMax = 4096;
inline constexpr int kIndexesMax = 8;

// --- From the wire.

// `policies` are the presets that the request may name.
absl::StatusOr<engine::OpenArgs> FromProto(const v1::OpenSequenceRequest& request,
                                           uint64_t max_sequence_tokens,
                                           const PolicyCatalog& policies = PolicyCatalog());

// --- To the wire.

// A preset, with the values of its parameters and the indexes that it needs. indexes:
// Engine::IndexesOf(policy).
void ToProto(const attention::Policy& policy, const attention::IndexSet& indexes,
             v1::PresetInfo* out);
void ToProto(const engine::SequenceInfo& info, v1::SequenceInfo* out);

}  // namespace attnd::server

#endif  // ATTND_SERVER_CALLS_SEQUENCE_CONVERSIONS_H_
