// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/tree_index_reference.h"

#include <cstring>
#include <utility>
#include <vector>

#include "tests/gpu/row_sums.h"

namespace attnd::gpu::test::reference {
namespace {

Vector ByteRow(const std::byte* codes, double scale, const Vector& base, size_t row) {
  std::vector<int8_t> own(base.size());
  std::memcpy(own.data(), codes + row * own.size(), own.size());
  Vector values = base;
  AddBytes(scale, own.data(), own.size(), values.data());
  return values;
}

Vector Floats(const std::byte* at, size_t count) {
  Vector values;
  for (size_t i = 0; i < count; ++i) values.push_back(Read<float>(at, i));
  return values;
}

std::vector<Item> ReadItems(const std::byte* index, const TreePart& at, const Tree& tree,
                            uint32_t segment, bool groups) {
  std::vector<Item> items;
  const size_t dim = tree.key_base.size();
  const uint32_t count = Read<uint32_t>(index + at.count, 0);
  for (uint32_t i = 0; i < count; ++i) {
    Item item;
    item.segment = segment;
    item.row = i;
    item.group = groups;
    item.centroid =
        ByteRow(index + at.centroids, Read<float>(index + at.centroid_scales, i), tree.key_base, i);
    item.mean_value = ByteRow(index + at.mean_values, Read<float>(index + at.mean_value_scales, i),
                              tree.value_base, i);
    item.variance = Variances(index + at.deviation_codes + i * dim / 2,
                              Read<float>(index + at.variance_unit, i), static_cast<uint32_t>(dim));
    item.log_size = Read<float>(index + at.log_size, i);
    item.spread = Read<float>(index + at.spread, i);
    item.value_norm2 = Read<float>(index + at.value_norm2, i);
    item.begin = Read<uint32_t>(index + at.starts, i);
    item.end = Read<uint32_t>(index + at.starts, i + 1);
    items.push_back(std::move(item));
  }
  return items;
}

Tree ReadTree(const Unit& unit, uint32_t segment) {
  const TreeOffsets& at = unit.header.trees[unit.row.trees_begin + segment].offsets;
  const std::byte* index = unit.IndexOf(segment);
  const size_t dim = unit.shape.head_dim, value_dim = unit.shape.value_dim;
  Tree tree;
  tree.key_base = Floats(index + at.key_base, dim);
  tree.value_base = Floats(index + at.value_base, value_dim);
  for (size_t a = 0; a < dim; ++a) {
    tree.axes.push_back(Load(DType::kBf16, index + at.axes + 2 * a * dim, dim));
    tree.slopes.push_back(Load(DType::kBf16, index + at.slopes + 2 * a * value_dim, value_dim));
  }
  tree.leaves = ReadItems(index, at.leaves, tree, segment, false);
  tree.groups = ReadItems(index, at.groups, tree, segment, true);
  for (size_t g = 0; g <= tree.groups.size(); ++g) {
    tree.first_members.push_back(Read<uint32_t>(index + at.groups.first_members, g));
  }
  return tree;
}

}  // namespace

const Tree& TreesOfStep::Of(const Unit& unit, uint32_t segment) {
  const auto [place, is_new] = trees_.try_emplace({unit.IndexOf(segment), segment});
  if (is_new) place->second = ReadTree(unit, segment);
  return place->second;
}

}  // namespace attnd::gpu::test::reference
