// SPDX-License-Identifier: Apache-2.0
#include "tests/oracle/labels.h"

#include <algorithm>
#include <cmath>

namespace attnd::oracle {

namespace {

// max over rows of |row[i]| for each channel.
Vector LargestMagnitudes(const std::vector<Vector>& rows) {
  Require(!rows.empty(), "at least one row");
  Vector largest(rows[0].size(), 0.0);
  for (const Vector& row : rows) {
    Require(row.size() == largest.size(), "rows of one size");
    for (std::size_t i = 0; i < row.size(); ++i) {
      largest[i] = std::max(largest[i], std::fabs(row[i]));
    }
  }
  return largest;
}

}  // namespace

Vector ChannelImportance(const std::vector<std::vector<Vector>>& queries,
                         const std::vector<Vector>& keys) {
  Vector importance = LargestMagnitudes(keys);
  if (queries.empty()) return importance;
  Vector factor(importance.size(), 0.0);
  for (const std::vector<Vector>& head : queries) {
    const Vector largest = LargestMagnitudes(head);
    Require(largest.size() == factor.size(), "queries and keys of one size");
    for (std::size_t i = 0; i < factor.size(); ++i) factor[i] += largest[i];
  }
  for (std::size_t i = 0; i < factor.size(); ++i) {
    importance[i] *= factor[i] / static_cast<double>(queries.size());
  }
  return importance;
}

TopSet ChooseChannels(const std::vector<std::vector<Vector>>& queries,
                      const std::vector<Vector>& keys, std::size_t count) {
  const Vector importance = ChannelImportance(queries, keys);
  return TakeTop(Range(0, importance.size()), importance, count);
}

std::vector<Vector> Project(const std::vector<Vector>& rows, const Indices& channels) {
  std::vector<Vector> projected;
  for (const Vector& row : rows) {
    Vector part;
    for (const std::size_t channel : channels) part.push_back(row.at(channel));
    projected.push_back(part);
  }
  return projected;
}

Labels MakeLabels(const std::vector<Vector>& keys, const Indices& channels, Int4Rounding rounding) {
  return {channels, ThroughInt4(Project(keys, channels), rounding)};
}

Vector LabelWeights(const std::vector<Vector>& queries, const Labels& labels,
                    const Indices& candidates, double scale) {
  return GroupWeights(Project(queries, labels.channels), labels.rows, candidates, scale);
}

TopSet SelectByLabels(const std::vector<Vector>& queries, const Labels& labels,
                      const Indices& candidates, const Budget& budget, std::size_t middle_tokens,
                      double scale) {
  return TakeTop(candidates, LabelWeights(queries, labels, candidates, scale),
                 TokensOf(budget, middle_tokens, candidates.size()));
}

}  // namespace attnd::oracle
