// SPDX-License-Identifier: Apache-2.0
//
// Options and results of auditing. engine/audit/auditor.h says how auditing works.
#ifndef ATTND_ENGINE_AUDIT_AUDIT_H_
#define ATTND_ENGINE_AUDIT_AUDIT_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"

namespace attnd::engine {

// Rows are audited only for an EventListener: without one no row is picked.
struct AuditOptions {
  // The share of all answered rows that is picked, 0..1; 0: none. The choice depends only on the
  // seed and on (sequence, layer, position) of a row, so that a repeated step makes the same
  // choice.
  double share = 0;
  uint64_t seed = 0;
  // The most that auditing takes, however many rows are picked: a share of one core's time, and
  // while steps run also of the processor time that the process gets; kCpuShareMin..1. Rows beyond
  // it are dropped and counted.
  double cpu_share = 0.01;
  static constexpr double kCpuShareMin = 0.001;
  // Limits of the picked rows that wait, by number and by bytes. The bytes are reserved from the
  // memory budget.
  uint32_t queue_rows = 64;
  uint64_t queue_bytes = uint64_t{4} << 20;

  // InvalidArgument names the option and its range.
  absl::Status Validate() const;
};

// The comparison of an answer with dense attention, for one query token of a row. The query token
// is chosen by the seed, as the row is.
struct AuditedRow {
  std::string preset;  // of the policy that answered
  uint64_t sequence_id = 0;
  uint64_t position = 0;  // of the row
  uint32_t layer = 0;
  uint32_t query_token = 0;  // number in the row
  // |o - o_dense| / |o_dense| of a query head (Euclidean norms): mean and maximum over the query
  // heads. If o_dense is zero: 0 if o is zero, too, else 1.
  double error_mean = 0;
  double error_max = 0;
  // Share of the true softmax mass that the answer's normaliser has: exp(lse - lse_dense), at most
  // 1 for each head, mean over the heads. Dropped tokens are missing from it. Estimated tokens
  // count with their estimate: too low an estimate gives a share below 1, too high an estimate
  // cannot be told from a correct one.
  double covered_mass = 0;
  // The reply's prediction of error_mean; only for rows of one query token whose policy predicts
  // it.
  std::optional<double> predicted_error;
  // The error that the row's policy aims at, if it aims at one.
  std::optional<double> tolerance;
};

// Why a picked row was not audited.
enum class AuditSkip : uint8_t {
  kExact,      // everything was read exactly: there is no error to find
  kPaged,      // a part of its KV is on disk (engine/audit/auditor.h says why that is not read)
  kGone,       // its KV was closed, truncated, segmented or moved to disk meanwhile
  kQueueFull,  // too many earlier rows have not been audited yet
  kNoMemory,   // the memory budget or the system has no room
};
inline constexpr int kAuditSkips = 5;

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_AUDIT_AUDIT_H_
