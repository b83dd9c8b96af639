// SPDX-License-Identifier: Apache-2.0
//
// k-means over keys and values together, with a part of the centres added late: the clusters of a
// `regression` index, of one (segment, layer, KV head)
// (docs/research/ERROR_TARGET.md, "Building", steps 1 and 2).
//
// How the definition is read where its words leave a choice:
//  - An iteration is one assignment of every token and one move of every centre, as in kmeans.h:
//  ten
//    of each, five before the late centres and five after. There is no eleventh assignment. With no
//    late centres (split 0, or nothing to split) there are ten all the same.
//  - m = floor(split C), where a product that falls short of a whole number only by rounding counts
//    as that number.
//  - q_c ranks the clusters of the fifth assignment about the centres as the fifth move left them;
//    of equal q_c the lower cluster comes first. Late centres are numbered C - m and up in the
//    order of that ranking; there are fewer than m of them if fewer clusters have a q_c above 0.
//  - Members are equally far from their centre if their squared distances differ by rounding only
//    (1e-12, relative): the two of a cluster of two always are, and the lower token wins.
//  - rho is a root mean square about the mean; rho and the means are of the tokens given, all of
//    them clustered (zones are not among them).
#ifndef ATTND_TESTS_ORACLE_JOINT_KMEANS_H_
#define ATTND_TESTS_ORACLE_JOINT_KMEANS_H_

#include <cstddef>
#include <vector>

#include "tests/oracle/softmax_state.h"

namespace attnd::oracle {

struct JointOptions {
  std::size_t tokens_per_cluster = 16;
  double split = 0.25;       // share of the centres that come late
  double value_share = 0.5;  // length of values beside keys; 0: keys alone
};

struct JointClusters {
  std::vector<std::size_t> assignment;  // [tokens], after empty clusters were dropped
  std::size_t count = 0;                // of clusters, none empty
  // The closest call that was made, relative: of assignments as in kmeans.h, of the ranking by q_c
  // where it decides who gives a centre and which number that has, and of farthest members. An
  // implementation in float32 must agree with assignment only if this is well above its rounding.
  double margin = 0.0;
};

// What is clustered: [tokens][head_dim + value_dim]. Its k-means objective under an assignment is
// Inertia(features, SummariseAssignment(features, values, assignment, count)) of kmeans.h.
std::vector<Vector> JointFeatures(const std::vector<Vector>& keys,
                                  const std::vector<Vector>& values, double value_share);

// keys: [tokens][head_dim], values: [tokens][value_dim]. No tokens: no clusters.
JointClusters ClusterJointly(const std::vector<Vector>& keys, const std::vector<Vector>& values,
                             const JointOptions& options = {});

}  // namespace attnd::oracle

#endif  // ATTND_TESTS_ORACLE_JOINT_KMEANS_H_
