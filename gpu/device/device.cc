// SPDX-License-Identifier: Apache-2.0
#include "gpu/device/device.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace attnd::gpu {
namespace {

std::string HeadDimsText() {
  std::string text;
  for (const auto& dims : kHeadDims) {
    absl::StrAppend(&text, text.empty() ? "" : ", ", dims.head_dim, "/", dims.value_dim);
  }
  return text;
}

std::string PayloadTypesText() {
  std::string text;
  for (const DType dtype : kPayloadTypes) {
    absl::StrAppend(&text, text.empty() ? "" : ", ", DTypeName(dtype));
  }
  return text;
}

}  // namespace

absl::Status CheckShape(const ModelShape& shape) {
  if (shape.latent) {
    return absl::UnimplementedError(
        "model.shape.latent is set; the CUDA backend has no kernels for it");
  }
  bool dtype_known = false;
  for (const DType dtype : kPayloadTypes) dtype_known |= dtype == shape.dtype;
  if (!dtype_known) {
    return absl::UnimplementedError(absl::StrCat("model.shape.dtype is ", DTypeName(shape.dtype),
                                                 "; the CUDA backend has ", PayloadTypesText()));
  }
  bool dims_known = false;
  for (const auto& dims : kHeadDims) {
    dims_known |= dims.head_dim == shape.head_dim && dims.value_dim == shape.value_dim;
  }
  if (!dims_known) {
    return absl::UnimplementedError(absl::StrCat("model.shape head_dim and value_dim are ",
                                                 shape.head_dim, "/", shape.value_dim,
                                                 "; the CUDA backend has ", HeadDimsText()));
  }
  if (shape.group() > kDeviceGroupMax) {
    return absl::UnimplementedError(
        absl::StrCat("model.shape has ", shape.group(),
                     " query heads to a KV head; the CUDA backend has up to ", kDeviceGroupMax));
  }
  return absl::OkStatus();
}

}  // namespace attnd::gpu
