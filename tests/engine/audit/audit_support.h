// SPDX-License-Identifier: Apache-2.0
//
// What the audit's tests share: an observer that keeps what it is told, and what an audit should
// find, from dense attention in double precision over a plain model of the sequence.
#ifndef ATTND_TESTS_ENGINE_AUDIT_AUDIT_SUPPORT_H_
#define ATTND_TESTS_ENGINE_AUDIT_AUDIT_SUPPORT_H_

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/audit/audit.h"
#include "engine/engine.h"
#include "tests/engine/support.h"
#include "tests/oracle/attention.h"

namespace attnd::engine::test {

class AuditRecorder : public EventListener {
 public:
  void OnAudited(const AuditedRow& row) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    audited_.push_back(row);
  }
  void OnAuditSkipped(AuditSkip why) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++skipped_[static_cast<size_t>(why)];
  }
  std::vector<AuditedRow> audited() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return audited_;
  }
  uint64_t skipped(AuditSkip why) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return skipped_[static_cast<size_t>(why)];
  }
  // Of all rows that were picked.
  uint64_t told() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    uint64_t sum = audited_.size();
    for (const uint64_t count : skipped_) sum += count;
    return sum;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<AuditedRow> audited_;
  std::array<uint64_t, kAuditSkips> skipped_{};
};

// SmallOptions that audit every row as fast as they can.
inline EngineOptions AuditingOptions() {
  EngineOptions options = SmallOptions();
  options.audit.share = 1;
  options.audit.cpu_share = 1;
  return options;
}

// What an audit should find of one query token of an answered row, whose sequence's model is as it
// was when it was answered.
inline AuditedRow ExpectedAudit(const Message& message, const Answer& answer, size_t number,
                                uint32_t token) {
  const Row& row = message.rows[number];
  const ModelShape& shape = row.sequence->shape();
  const RowAnswer found = AnswerOf(message, answer, number);
  const Kv& all = row.sequence->history.layers[message.args.layer];
  const uint64_t seen = row.query_only ? row.position : row.position + token + 1;
  const auto rows = [](const std::vector<double>& flat, uint64_t first, uint64_t dim) {
    const auto begin = flat.begin() + static_cast<ptrdiff_t>(first * dim);
    return oracle::Vector(begin, begin + static_cast<ptrdiff_t>(dim));
  };
  AuditedRow expected;
  for (uint64_t head = 0; head < shape.query_heads; ++head) {
    const uint64_t kv_head = head / shape.group();
    std::vector<oracle::Vector> keys, values;
    for (uint64_t j = 0; j < seen; ++j) {
      keys.push_back(rows(all.k.values, j * shape.kv_heads + kv_head, shape.head_dim));
      values.push_back(rows(all.v.values, j * shape.kv_heads + kv_head, shape.value_dim));
    }
    const uint64_t slot = token * shape.query_heads + head;
    const oracle::HeadOutput right =
        oracle::DenseHead(rows(row.q.values, slot, shape.head_dim), keys, values,
                          shape.softmax_scale, shape.value_dim);
    double off2 = 0, norm2 = 0;
    for (uint64_t c = 0; c < shape.value_dim; ++c) {
      const double off = found.out[slot * shape.value_dim + c] - right.out[c];
      off2 += off * off;
      norm2 += right.out[c] * right.out[c];
    }
    const double error = std::sqrt(off2 / norm2);
    expected.error_mean += error / shape.query_heads;
    expected.error_max = std::max(expected.error_max, error);
    expected.covered_mass +=
        std::min(1.0, std::exp(found.lse[slot] - right.lse)) / shape.query_heads;
  }
  return expected;
}

// Answers are single precision, and so are an audit's sums within a segment.
inline testing::AssertionResult SameFindings(const AuditedRow& found, const AuditedRow& expected) {
  constexpr double kTolerance = 5e-5;
  const bool same = std::abs(found.error_mean - expected.error_mean) <= kTolerance &&
                    std::abs(found.error_max - expected.error_max) <= kTolerance &&
                    std::abs(found.covered_mass - expected.covered_mass) <= kTolerance;
  if (same) return testing::AssertionSuccess();
  return testing::AssertionFailure()
         << "sequence " << found.sequence_id << " layer " << found.layer << " position "
         << found.position << " + " << found.query_token << " " << found.preset << ": error "
         << found.error_mean << ", greatest " << found.error_max << ", mass " << found.covered_mass
         << " for " << expected.error_mean << ", " << expected.error_max << ", "
         << expected.covered_mass;
}

}  // namespace attnd::engine::test

#endif  // ATTND_TESTS_ENGINE_AUDIT_AUDIT_SUPPORT_H_
