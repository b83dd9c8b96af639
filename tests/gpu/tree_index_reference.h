// SPDX-License-Identifier: Apache-2.0
//
// A tree as the bytes of a segment's index describe it, for the naive references.
#ifndef ATTND_TESTS_GPU_TREE_INDEX_REFERENCE_H_
#define ATTND_TESTS_GPU_TREE_INDEX_REFERENCE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "tests/gpu/unit_reference.h"

namespace attnd::gpu::test::reference {

// A leaf or a group, as its segment's index describes it.
struct Item {
  uint32_t segment, row;  // row: of the segment's leaves or groups
  bool group;
  Vector centroid, mean_value, variance;
  double log_size, spread, value_norm2;
  uint32_t begin, end;  // tokens in the segment's order
  double tokens() const { return end - begin; }
};

// One segment's tree, for one KV head.
struct Tree {
  Vector key_base, value_base;
  std::vector<Vector> axes, slopes;  // [head_dim] rows
  std::vector<Item> leaves, groups;
  std::vector<uint32_t> first_members;  // of each group, and the number of leaves
};

// The trees that a step's units look at, each read once.
class TreesOfStep {
 public:
  // segment: of the unit's row. What is returned stays where it is.
  const Tree& Of(const Unit& unit, uint32_t segment);

 private:
  // By where the index lies, and by the segment's number, which items have.
  std::map<std::pair<const std::byte*, uint32_t>, Tree> trees_;
};

}  // namespace attnd::gpu::test::reference

#endif  // ATTND_TESTS_GPU_TREE_INDEX_REFERENCE_H_
