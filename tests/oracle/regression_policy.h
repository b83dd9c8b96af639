// SPDX-License-Identifier: Apache-2.0
//
// error-target over `regression` indexes, for one query token and one KV head, in double precision
// (docs/research/ERROR_TARGET.md, "Scores", "Selection", "Predicted error").
//
// A test of an engine fills the segments with what the engine's index holds, takes Select() for
// which plans are right (CheckPlan() of policies.h), and on the engine's own plan Estimate() merged
// with zones and exact tokens for the answer, and PredictedError() for what the reply must say.
//
// How the definition is read where its words leave a choice:
//  - Clusters are numbered through, segment first.
//  - The guard is max(1e-3 r, 2^-126), r the root of sum_i p_i |V_i|^2 + p_zone |o_zone|^2, p the
//    shares of Z: over all clusters by their estimates, whatever is read, and over the zones'
//    merged value. The shift is not in r.
//  - |o~|^2 of the mass term is as it is, without the guard.
//  - "From the smallest upward" is from the end of the ranking by E_i / s_i.
//  - Tolerance 0 makes every cluster exact, those with E_i = 0 too, as before; tolerance infinity
//    leaves the floor. A floor of 0 is none, any other takes at least one cluster (FractionCount).
//  - q~ in H is exact where q~^2 in d2 is rounded (square_steps).
#ifndef ATTND_TESTS_ORACLE_REGRESSION_POLICY_H_
#define ATTND_TESTS_ORACLE_REGRESSION_POLICY_H_

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "tests/oracle/policies.h"
#include "tests/oracle/ranking.h"
#include "tests/oracle/regression.h"
#include "tests/oracle/softmax_state.h"

namespace attnd::oracle {

struct RegressionInput {
  std::vector<Regression> segments;
  double scale = 1.0;
  std::size_t value_dim = 0;
  // How a query's squared coordinates along a segment's axes are stored for d2: exactly, or each
  // rounded to this many steps of the greatest.
  std::optional<double> square_steps;
  // Whose first pass gives the outputs that errors are relative to before anything is read: the
  // groups of which some were opened. Null: this input's own.
  std::shared_ptr<const RegressionInput> outputs_of = nullptr;
  // Which clusters are chosen from later: their errors count in no budget. Empty: none.
  std::vector<bool> undecided = {};
  // Of each cluster, at how many deviations above its mean a token may be hidden; empty where
  // hidden tokens do not count.
  Vector hidden_deviations = {};
};

// Of one query head; each [clusters].
struct HeadScores {
  Vector spread;    // d2
  Vector lift;      // l
  Vector damping;   // f
  Vector log_mass;  // ln Z
};
HeadScores Scores(const RegressionInput& input, const Vector& query);

// What a set of clusters that are not read contributes to one query head.
struct RegressionEstimate {
  SoftmaxState state;  // the shift is in n
  // H, as n is: times exp(-state.m). All 0 for the empty set.
  Vector shift;             // [value_dim]
  double shift_norm = 0.0;  // |shift|
  double variance = 0.0;    // of logits in the set's clusters, at most 8 each; mean by mass
};
RegressionEstimate Estimate(const RegressionInput& input, const Vector& query, const Indices& set);

// e_i^2 of all clusters for one query head, relative to an output with natural log of mass `lse`.
// zones: its softmax state over the zones.
Vector SquaredErrors(const RegressionInput& input, const Vector& query, const SoftmaxState& zones,
                     double lse, const Vector& out);

// e_i^2 of the first pass: lse of the zones and all clusters by their estimates, and out of those
// of outputs_of.
Vector FirstPassSquaredErrors(const RegressionInput& input, const Vector& query,
                              const SoftmaxState& zones);

struct ErrorTargetSelection {
  // For CheckPlan(); without cuts. Its plan has every cluster, exact or estimated.
  Selection selection;
  Vector errors;      // [clusters] E_i
  Vector optimistic;  // [clusters] P_i
};

// queries: [group][head_dim], zones: [group]. The selection's must and may allow for errors
// (relative) of `margin` in E_i, in P_i and in the sums.
ErrorTargetSelection Select(const RegressionInput& input, const std::vector<Vector>& queries,
                            const std::vector<SoftmaxState>& zones, double tolerance, double floor,
                            double margin = 1e-4);

// The same where only some clusters may be read: candidates[i] says whether cluster i may. The
// errors of the others count first, and the floor takes floor_count of the candidates. optimism:
// standard deviations in P.
ErrorTargetSelection SelectAmong(const RegressionInput& input, const std::vector<Vector>& queries,
                                 const std::vector<SoftmaxState>& zones, double tolerance,
                                 std::size_t floor_count, const std::vector<bool>& candidates,
                                 double optimism = 2.0, double margin = 1e-4);

// The same for tolerances of each head alone, infinity for none: whatever one head's error needs is
// read.
ErrorTargetSelection SelectForHeads(const RegressionInput& input,
                                    const std::vector<Vector>& queries,
                                    const std::vector<SoftmaxState>& zones,
                                    const std::vector<double>& tolerances, std::size_t floor_count,
                                    const std::vector<bool>& candidates, double optimism = 2.0,
                                    double margin = 1e-4);

// How much the clusters' own errors count in a prediction.
inline constexpr double kIndependent = 1.2;

// PredictedError() relative to the first pass's lse and out.
double ExpectedError(const RegressionInput& input, const Vector& query, const SoftmaxState& zones,
                     const Indices& estimated);

// Of one query head's answer with these lse and out, that left the clusters of the set to their
// estimates; 0 if the set is empty.
double PredictedError(const RegressionInput& input, const Vector& query, const SoftmaxState& zones,
                      const Indices& estimated, double lse, const Vector& out);

// Clusters of all segments.
std::size_t ClusterCount(const RegressionInput& input);

}  // namespace attnd::oracle

#endif  // ATTND_TESTS_ORACLE_REGRESSION_POLICY_H_
