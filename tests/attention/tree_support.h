// SPDX-License-Identifier: Apache-2.0
//
// What the tests of built trees share, whoever builds them.
#ifndef ATTND_TESTS_ATTENTION_TREE_SUPPORT_H_
#define ATTND_TESTS_ATTENTION_TREE_SUPPORT_H_

#include <cstdint>

#include "attention/segment/segment.h"
#include "tests/attention/support.h"

namespace attnd::attention::test {

// The segment's tree is what its definition says of the clusters and groups that it has: the oracle
// describes these in double precision, in the tree's own axes. What is stored in bytes may differ
// by half a step.
void ExpectTree(const Segment& segment, uint32_t layer, uint32_t kv_head, const HeadData& data);

}  // namespace attnd::attention::test

#endif  // ATTND_TESTS_ATTENTION_TREE_SUPPORT_H_
