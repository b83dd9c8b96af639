// SPDX-License-Identifier: Apache-2.0
//
// The cluster policies for one query token and one KV head in double precision (docs/POLICIES.md).
//
// A test of an engine has three steps:
//   1. Select() here says which plans are right; CheckPlan() says whether the engine's plan is one
//   of them (plans may
//      differ from the oracle's only where scores lie close to a cut);
//   2. Evaluate() on the engine's own plan gives the answer that the engine must have found;
//   3. DenseHead() on all tokens gives the error that the plan really has.
//
// How the definitions are read where their words leave a choice:
//  - clusters-top-k: its fractions are shares of the number of clusters over all segments (the only
//    thing the preset can count without reading sizes, and what RetroInfer's code counts), each
//    rounded up by itself, together at most all.
//  - A product fraction * count that exceeds a whole number only by rounding counts as that number:
//    FractionCount().
//  - A floor fraction of 0 turns the floor off, any other takes at least one cluster.
//  - double-p: a threshold of 1 (or more) takes every cluster, whatever the rounding of the running
//    sum.
//  - error-target: tolerance 0 makes every cluster exact, those with e_i = 0 too; tolerance
//    infinity leaves the floor.
//  - `tiny` is the least normal float, 2^-126.
//  - The predicted error of an answer has e_i with the answer's own Z and |o|. The guard 1e-3
//    sqrt(sum p_i |V_i|^2) keeps its sum over all clusters (by their estimates) and zone tokens,
//    with p_i = Z_i / the answer's Z. Dropped clusters add nothing to it: it predicts the error of
//    estimating, not of dropping.
//  - MassEstimate holds for selection and for the answer. The floor's optimistic mass and expm1(d2)
//    are the same for both.
#ifndef ATTND_TESTS_ORACLE_POLICIES_H_
#define ATTND_TESTS_ORACLE_POLICIES_H_

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "tests/oracle/kmeans.h"
#include "tests/oracle/softmax_state.h"

namespace attnd::oracle {

struct Cluster {
  double size = 0.0;  // tokens
  Vector centroid;    // [head_dim] as stored: rounded, if the engine rounds
  Vector mean_value;  // [value_dim] as stored
  Vector variance;    // [head_dim] dequantised
  double value_spread = 0.0;
  // The members; a cluster that no plan reads may be without.
  std::vector<Vector> keys;    // [size][head_dim]
  std::vector<Vector> values;  // [size][value_dim]

  std::size_t Tokens() const { return static_cast<std::size_t>(size); }
};

// The clusters of a segment with 4-bit variances, centroids and mean values as they are in double.
std::vector<Cluster> ClustersOf(const SegmentIndex& index, const std::vector<Vector>& keys,
                                const std::vector<Vector>& values);

struct PolicyInput {
  std::vector<Vector> queries;  // [group][head_dim]
  // Tokens that are always exact: sink, window, tail and those new tokens that the query sees.
  std::vector<Vector> zone_keys;    // [zone tokens][head_dim]
  std::vector<Vector> zone_values;  // [zone tokens][value_dim]
  // [segments][clusters]. Clusters are numbered through in this order everywhere below.
  std::vector<std::vector<Cluster>> segments;
  double scale = 1.0;
  std::size_t value_dim = 0;
  // How a query's squared channels are stored for d2: exactly, or each rounded to this many steps
  // of the greatest.
  std::optional<double> square_steps;
};

enum class Preset { kDense, kStreaming, kClustersTopK, kDoubleP, kErrorTarget };

// ln Z_i = a q . C_i + ln s_i (first order), + min(d2_i, 8) / 2 (second order).
enum class MassEstimate { kFirstOrder, kSecondOrder };

struct Policy {
  Preset preset = Preset::kDense;
  MassEstimate mass = MassEstimate::kFirstOrder;
  double exact_fraction = 0.018;      // clusters-top-k
  double estimated_fraction = 0.232;  // clusters-top-k
  double p1 = 0.95;                   // double-p: mass that is exact or estimated
  double p2 = 0.7;                    // double-p: mass that is exact
  double tolerance = 0.2;             // error-target
  double floor = 0.01;                // error-target
};

// The presets with their own mass estimates.
Policy DensePolicy();
Policy StreamingPolicy();
Policy ClustersTopKPolicy(double exact_fraction = 0.018, double estimated_fraction = 0.232);
Policy DoublePPolicy(double p1 = 0.95, double p2 = 0.7);
Policy ErrorTargetPolicy(double tolerance = 0.2, double floor = 0.01);

// ceil(fraction * count), at least 1 and at most count; 0 if the fraction is 0 or the count is.
std::size_t FractionCount(double fraction, std::size_t count);

// One cut through a ranking of all clusters.
struct Cut {
  std::string name;
  Vector scores;                   // [clusters], none negative
  std::vector<std::size_t> order;  // clusters by descending score, the lower number first on a tie
  std::size_t taken = 0;           // order[0 .. taken) is inside
  // What an implementation with another rounding may do: a cluster in must has to be inside, one
  // not in may outside. The sums that decide where a cut lies may be off by `margin` (relative),
  // and so may each score.
  std::vector<bool> must;  // [clusters]
  std::vector<bool> may;   // [clusters]
};

struct Plan {
  std::vector<std::size_t> exact;      // ascending
  std::vector<std::size_t> estimated;  // ascending; those in neither are dropped
};

struct Selection {
  Plan plan;
  // Each is the union of the sets of one or two cuts.
  std::vector<bool> must_exact, may_exact;      // [clusters]
  std::vector<bool> must_covered, may_covered;  // [clusters] exact or estimated
  std::vector<Cut> cuts;  // in the order the policy makes them; empty for dense and streaming
};

Selection Select(const PolicyInput& input, const Policy& policy, double margin = 1e-4);

// Empty if plan is right within the selection's margins, else the first thing wrong with it.
std::string CheckPlan(const Selection& selection, const Plan& plan);

struct HeadAnswer {
  Vector out;        // [value_dim]
  double lse = 0.0;  // natural log, estimates included, dropped clusters left out; -infinity if
                     // nothing was covered
  // Shares of the mass of all tokens, where clusters not read count by their estimates. 1 if there
  // is no token.
  double covered_mass = 0.0;  // zones, exact and estimated clusters
  double exact_mass = 0.0;    // zones and exact clusters
  double predicted_error = 0.0;
};

struct Answer {
  std::vector<HeadAnswer> heads;  // [group]
  std::size_t exact_tokens = 0;   // of the middle
  std::size_t estimated_tokens = 0;
  std::size_t dropped_tokens = 0;
};

// What a plan answers, whoever made it.
Answer Evaluate(const PolicyInput& input, MassEstimate mass, const Plan& plan);

// Evaluate(Select()).
Answer Attend(const PolicyInput& input, const Policy& policy);

// The parts, for tests of single ones. Vectors are [clusters].

// d2_i = a^2 sum_c q_c^2 w_ic, the squares as square_steps says.
Vector LogitSpread(const PolicyInput& input, const Vector& query);
// ln Z_i.
Vector LogMass(const PolicyInput& input, const Vector& query, MassEstimate mass);
// Softmax over all clusters for each head (log masses: [group][clusters]), then the mean over the
// group.
Vector GroupImportance(const std::vector<Vector>& log_masses);
// e_i of one head from the first pass: zones exact, every cluster by its estimate.
Vector FirstPassErrors(const PolicyInput& input, const Vector& query, MassEstimate mass);

}  // namespace attnd::oracle

#endif  // ATTND_TESTS_ORACLE_POLICIES_H_
