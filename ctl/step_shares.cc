// SPDX-License-Identifier: Apache-2.0
#include "ctl/step_shares.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <span>

namespace attnd::ctl {
namespace {

using attention::ClusterForm;

struct Measured {
  uint64_t length;
  StepShares shares;
};

// At 131,072 tokens "What a step costs" of docs/research/TREE.md. The other lines are the tables
// second-nano-llama-8192, second-nano-llama-16384, second-nano-llama-long-32768 and
// second-nano-llama-long-65536 of docs/QUALITY.md, lines 0.1@tree, 0.1@regression and 0.1@clusters.
// Of the models there these read most.
constexpr Measured kTree[] = {{8192, {.0129, .410}},
                              {16384, {.0122, .283}},
                              {32768, {.0120, .207}},
                              {65536, {.0117, .144}},
                              {131072, {.012, .127}}};
constexpr Measured kRegression[] = {{8192, {.0131, 1}},
                                    {16384, {.0115, 1}},
                                    {32768, {.0089, 1}},
                                    {65536, {.0078, 1}},
                                    {131072, {.008, 1}}};
constexpr Measured kMeans[] = {{8192, {.1002, 1}},
                               {16384, {.0570, 1}},
                               {32768, {.0248, 1}},
                               {65536, {.0173, 1}},
                               {131072, {.018, 1}}};

std::span<const Measured> MeasuredOf(ClusterForm form) {
  switch (form) {
    case ClusterForm::kTree:
      return kTree;
    case ClusterForm::kRegression:
      return kRegression;
    case ClusterForm::kMeans:
      return kMeans;
  }
  return {};
}

// Linear in the logarithm of the length.
StepShares Between(const Measured& below, const Measured& above, uint64_t length) {
  const auto log_of = [](uint64_t number) { return std::log2(static_cast<double>(number)); };
  const double part =
      (log_of(length) - log_of(below.length)) / (log_of(above.length) - log_of(below.length));
  return {std::lerp(below.shares.tokens, above.shares.tokens, part),
          std::lerp(below.shares.rows, above.shares.rows, part)};
}

}  // namespace

std::optional<StepShares> StepSharesOf(const attention::IndexSet& indexes, uint64_t length) {
  const auto form = indexes.cluster_form();
  if (!form.has_value() || indexes.tree_sizes() != attention::TreeSizes{}) return std::nullopt;
  const std::span<const Measured> measured = MeasuredOf(*form);
  const auto above = std::find_if(measured.begin(), measured.end(),
                                  [&](const Measured& line) { return line.length >= length; });
  if (above == measured.begin()) return measured.front().shares;
  if (above == measured.end()) return measured.back().shares;
  return Between(*std::prev(above), *above, length);
}

}  // namespace attnd::ctl
