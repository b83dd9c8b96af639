// SPDX-License-Identifier: Apache-2.0
//
// The one list of the shapes for which the kernels are compiled. To add a shape, add a line to the
// list, a file cuda/step/step_<dtype>_<head_dim>_<value_dim>.cu, and a case to each test that asks
// for one. From the list follow
//   - validation: CheckShape (device/device.h) refuses every other shape and names these;
//   - the build: gpu/CMakeLists.txt reads this file and compiles a step_*.cu for each line;
//   - dispatch: of a step's kernels (cuda/step/step_kernels.h; a line without an instance fails to
//     link, an instance without a line fails its static_assert) and of an index build's
//     (cuda/index/index_kernels.cuh);
//   - the tests' matrix: the tests of parity and tests/gpu/index_check run each line, and fail if
//     they have no case for a line.
#ifndef ATTND_GPU_LAYOUT_KERNEL_SHAPES_H_
#define ATTND_GPU_LAYOUT_KERNEL_SHAPES_H_

#include <cstddef>
#include <cstdint>
#include <utility>

#include "common/dtype_bytes.h"

namespace attnd::gpu {

// The dtype of keys and values, and the channels of each.
struct KernelShape {
  DType dtype;
  uint32_t head_dim;
  uint32_t value_dim;
  bool operator==(const KernelShape&) const = default;
};

// Tokens of a page, and bytes of one KV head's page: keys, then values (attention/segment/pages.h).
inline constexpr uint32_t kPageRows = 16;
constexpr uint32_t PageBytesOf(const KernelShape& shape) {
  return kPageRows * (shape.head_dim + shape.value_dim) *
         static_cast<uint32_t>(DTypeBytes(shape.dtype));
}

inline constexpr KernelShape kKernelShapes[] = {
    {DType::kBf16, 64, 64},    //
    {DType::kBf16, 128, 128},  //
    {DType::kBf16, 192, 128},  //
    {DType::kBf16, 256, 256},  //
    {DType::kFp16, 64, 64},    //
    {DType::kFp16, 128, 128},  //
    {DType::kFp16, 192, 128},  //
    {DType::kFp16, 256, 256},
};
inline constexpr size_t kKernelShapeCount = sizeof(kKernelShapes) / sizeof(kKernelShapes[0]);
// The most query heads of a KV head; the kernels take any number up to it.
inline constexpr uint32_t kKernelGroupMax = 32;

constexpr bool HasKernels(const KernelShape& shape) {
  for (const KernelShape& compiled : kKernelShapes) {
    if (compiled == shape) return true;
  }
  return false;
}

// An entry of the list as a type, for templates that are instantiated for it.
template <size_t kNumber>
struct ListedShape {
  static constexpr DType kDtype = kKernelShapes[kNumber].dtype;
  static constexpr uint32_t kHeadDim = kKernelShapes[kNumber].head_dim;
  static constexpr uint32_t kValueDim = kKernelShapes[kNumber].value_dim;
};

// Calls use(ListedShape<number>()) for the first entry for which matches(entry) is true. False if
// there is none.
template <typename Matches, typename Use>
constexpr bool DispatchListedShape(Matches matches, Use use) {
  const auto try_all = [&]<size_t... kNumbers>(std::index_sequence<kNumbers...>) {
    return ((matches(kKernelShapes[kNumbers]) && (use(ListedShape<kNumbers>()), true)) || ...);
  };
  return try_all(std::make_index_sequence<kKernelShapeCount>());
}

// Whether no entry is there twice, and the kernels can be compiled for each: their matrix products
// take elements of 16 bits and multiples of 64 channels.
constexpr bool ListIsSound() {
  for (size_t i = 0; i < kKernelShapeCount; ++i) {
    const KernelShape& shape = kKernelShapes[i];
    if (DTypeBytes(shape.dtype) != 2 || shape.head_dim % 64 != 0 || shape.value_dim % 64 != 0) {
      return false;
    }
    for (size_t j = 0; j < i; ++j) {
      if (kKernelShapes[j] == shape) return false;
    }
  }
  return true;
}
static_assert(ListIsSound(), "two equal entries, or one that the kernels cannot be compiled for");

}  // namespace attnd::gpu

#endif  // ATTND_GPU_LAYOUT_KERNEL_SHAPES_H_
