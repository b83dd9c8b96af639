// SPDX-License-Identifier: Apache-2.0
//
// What auditing is told and what it tells: its options and its findings. How it works stands in
// engine/audit/auditor.h.
#ifndef ATTND_ENGINE_AUDIT_AUDIT_H_
#define ATTND_ENGINE_AUDIT_AUDIT_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"

namespace attnd::engine {

// Rows are audited only for an EventListener: without one no row is picked.
struct AuditOptions {
  // Of all answered rows, 0..1; 0: none. Which ones depends on the seed and on what names the row
  // (sequence, layer, position), so that a repeated step makes the same choice.
  double share = 0;
  uint64_t seed = 0;
  // Of one core's time, and while steps run of the processor time that the process gets,
  // kCpuShareMin..1: what auditing takes at most, however many rows are picked. Those beyond it are
  // dropped and counted.
  double cpu_share = 0.01;
  static constexpr double kCpuShareMin = 0.001;
  // Picked rows that wait; both bound them, and they hold their bytes of the memory budget.
  uint32_t queue_rows = 64;
  uint64_t queue_bytes = uint64_t{4} << 20;

  // InvalidArgument names the option and its range.
  absl::Status Validate() const;
};

// A row's answer beside dense attention: of one query token of it, chosen as the row was.
struct AuditedRow {
  std::string preset;  // of the policy that answered
  uint64_t sequence_id = 0;
  uint64_t position = 0;  // the row's
  uint32_t layer = 0;
  uint32_t query_token = 0;  // of the row
  // |o - o_dense| / |o_dense| of a query head (Euclidean norms), over the query heads. Where
  // o_dense is zero: 0 if o is, else 1, as an answer of nothing has in place of something.
  double error_mean = 0;
  double error_max = 0;
  // Share of the true softmax mass that the answer's normaliser has: exp(lse - lse_dense), at most
  // 1 for each head, mean over the heads. What a policy dropped is missing in it, and what it
  // estimated counts as it was estimated: too low an estimate is a share below 1, too high a one
  // cannot be told from a right one.
  double covered_mass = 0;
  // What the reply had predicted as error_mean; rows of one query token whose policy predicts it.
  std::optional<double> predicted_error;
  // The error that the row's policy aims at; policies that aim at one.
  std::optional<double> tolerance;
};

// Why a picked row was not audited.
enum class AuditSkip : uint8_t {
  kExact,      // everything was read exactly: there is nothing to find
  kPaged,      // a part of it lies on disk (engine/audit/auditor.h says why that is not read)
  kGone,       // its KV is no longer what it was: closed, truncated, segmented or moved to disk
  kQueueFull,  // earlier ones have not been audited yet
  kNoMemory,   // the memory budget or the system has no room
};
inline constexpr int kAuditSkips = 5;

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_AUDIT_AUDIT_H_
