// SPDX-License-Identifier: Apache-2.0
//
// TreeOf: the index `tree` in sizes of a test's choice.
#ifndef ATTND_TESTS_TREE_INDEXES_H_
#define ATTND_TESTS_TREE_INDEXES_H_

#include "attention/segment/index_set.h"

namespace attnd::test {

constexpr attention::IndexSet TreeOf(const attention::TreeSizes& sizes) {
  attention::IndexSet indexes = attention::kTreeIndexes;
  indexes.set_tree_sizes(sizes);
  return indexes;
}

}  // namespace attnd::test

#endif  // ATTND_TESTS_TREE_INDEXES_H_
