// SPDX-License-Identifier: Apache-2.0
#include "gpu/device/device.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace attnd::gpu {
namespace {

void AddOnce(std::string text, std::vector<std::string>* texts) {
  if (!absl::c_linear_search(*texts, text)) texts->push_back(std::move(text));
}

// The dtypes of kKernelShapes.
std::string DTypesText() {
  std::vector<std::string> names;
  for (const KernelShape& shape : kKernelShapes) {
    AddOnce(std::string(DTypeName(shape.dtype)), &names);
  }
  return absl::StrJoin(names, ", ");
}

// The pairs of head_dim and value_dim that a dtype has in kKernelShapes.
std::string DimsText(DType dtype) {
  std::vector<std::string> dims;
  for (const KernelShape& shape : kKernelShapes) {
    if (shape.dtype == dtype) {
      AddOnce(absl::StrCat(shape.head_dim, "/", shape.value_dim), &dims);
    }
  }
  return absl::StrJoin(dims, ", ");
}

}  // namespace

absl::Status CheckShape(const ModelShape& shape) {
  if (shape.latent) {
    return absl::UnimplementedError(
        "model.shape.latent is set; the CUDA backend has no kernels for it");
  }
  const bool dtype_known =
      absl::c_any_of(kKernelShapes, [&](const KernelShape& k) { return k.dtype == shape.dtype; });
  if (!dtype_known) {
    return absl::UnimplementedError(absl::StrCat("model.shape.dtype is ", DTypeName(shape.dtype),
                                                 "; the CUDA backend has ", DTypesText()));
  }
  if (!HasKernels(KernelShapeOf(shape))) {
    return absl::UnimplementedError(absl::StrCat("model.shape head_dim and value_dim are ",
                                                 shape.head_dim, "/", shape.value_dim,
                                                 "; the CUDA backend has ", DimsText(shape.dtype)));
  }
  if (shape.group() > kKernelGroupMax) {
    return absl::UnimplementedError(
        absl::StrCat("model.shape has ", shape.group(),
                     " query heads to a KV head; the CUDA backend has up to ", kKernelGroupMax));
  }
  return absl::OkStatus();
}

}  // namespace attnd::gpu
