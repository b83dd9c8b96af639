// SPDX-License-Identifier: Apache-2.0
//
// The head of a safetensors file (huggingface.co/docs/safetensors, "Format"): 8 bytes, little
// endian, its length; then JSON that names tensors and says where their bytes lie, counted from the
// head's end; and texts under "__metadata__". Pure functions: no I/O.
#ifndef ATTND_COMMON_SAFETENSORS_H_
#define ATTND_COMMON_SAFETENSORS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace attnd {

inline constexpr uint64_t kHeadLengthBytes = 8;
inline constexpr uint64_t kHeadBytesMax = uint64_t{16} << 20;  // as it is read; the format: 100 MB
// Sizes are JSON's numbers: exact up to here.
inline constexpr uint64_t kTensorBytesMax = uint64_t{1} << 49;

struct TensorEntry {
  std::string dtype;  // "BF16", "F16", "F32", "I64"
  std::vector<uint64_t> shape;
  uint64_t begin = 0;  // of its bytes, behind the head
  uint64_t end = 0;
  uint64_t bytes() const { return end - begin; }
};

struct SafetensorsHead {
  std::map<std::string, TensorEntry> tensors;
  std::map<std::string, std::string> metadata;
};

// The length and the JSON, padded with spaces to a multiple of 8 bytes. Internal if the library
// makes no JSON of it.
absl::StatusOr<std::string> EncodeHead(const SafetensorsHead& head);

// InvalidArgument says what is wrong with the length: whether it fits a file of that size.
absl::StatusOr<uint64_t> DecodeHeadLength(absl::string_view first_bytes, uint64_t file_bytes);
// json: the head without its length; data_bytes: what is behind it. InvalidArgument names what is
// wrong. Tensors of dtypes that are not above may have any number of bytes.
absl::StatusOr<SafetensorsHead> DecodeHead(absl::string_view json, uint64_t data_bytes);

}  // namespace attnd

#endif  // ATTND_COMMON_SAFETENSORS_H_
