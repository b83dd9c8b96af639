// SPDX-License-Identifier: Apache-2.0
//
// Numbers of docs/POLICIES.md that every backend must agree on. No other header is needed, so that
// kernels include them, too.
#ifndef ATTND_ATTENTION_POLICY_ESTIMATE_LIMITS_H_
#define ATTND_ATTENTION_POLICY_ESTIMATE_LIMITS_H_

namespace attnd::attention {

// A cluster's variance of logits is capped before it is exponentiated.
inline constexpr float kVarianceCap = 8.0f;
// The greatest error of a cluster, before it is squared: a sum of the squares over all clusters
// stays a float.
inline constexpr float kErrorMax = 1e14f;
// With a regression (docs/POLICIES.md, "error-target"): the weight of the error of a cluster's mass
// beside the error of its values.
inline constexpr float kMassErrorShare = 0.5f;
// How much the parts of a predicted error with a regression count: the clusters' own errors; and
// the error that clusters have in common, relative to the slopes' correction of their estimate
// times the root of their logits' mean variance.
inline constexpr float kIndependentShare = 1.2f;
inline constexpr float kCoherentShare = 0.7f;
// Where a cluster might hold the one token that a query looks for, this token's logit counts as so
// many standard deviations above the mean. A group has the members of several clusters, so that one
// of them may lie farther out; a section counts like a group.
inline constexpr float kOptimism = 2.0f;
inline constexpr float kGroupOptimism = 4.0f;
// Of a latent shape with a regression: the square of a predicted error grows by this share of the
// square of the mass that estimated clusters may hide (HiddenMass).
inline constexpr float kHiddenShare = 0.1f;
// Over a tree: the share of the tolerance that the error of closed groups may take; and the share
// of the groups that are opened in any case, at least so many times the policy's floor, and at
// least so many groups: a short text's index costs little, and a few groups hide much of it. The
// same of sections.
inline constexpr double kClosedErrorShare = 0.3;
inline constexpr double kClosedSectionsShare = 0.2;
inline constexpr double kOpenedShare = 0.05;
inline constexpr double kOpenedPerFloor = 2;
inline constexpr unsigned kOpenedLeast = 32;
// With a quantile: of the shares of the tolerance above, what is closed may take this part for each
// head, as reading more cannot lower its error; how often clusters are chosen, beside what is
// closed and with everything open; and what a head's limit becomes, in parts of what its predicted
// error asks for: the error that clusters have in common does not fall as fast as what is
// estimated.
inline constexpr double kQuantileClosedShare = 0.5;
inline constexpr int kQuantileTriesBesideClosed = 2;
inline constexpr int kQuantileTries = 5;
inline constexpr double kQuantileSlack = 0.8;
// The logarithm of a row's error over what its prediction is kept below is taken for normal, with
// this mean and this standard deviation.
inline constexpr double kErrorBias = -1.35;
inline constexpr double kErrorSpread = 1.15;
// An output may cancel to nearly nothing; errors are then relative to this share of the values'
// root mean square.
inline constexpr float kLeastNormShare = 1e-3f;
// A share of a number that exceeds a whole number only by rounding counts as that whole number:
// 0.07 * 100 is a little above 7.
inline constexpr double kShareRounding = 1e-9;

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_POLICY_ESTIMATE_LIMITS_H_
