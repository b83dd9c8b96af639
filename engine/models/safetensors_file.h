// SPDX-License-Identifier: Apache-2.0
//
// Safetensors files that a server is started with, each of one model: feature maps, label channels.
// What they share: reading a file within a limit, and its tensors and metadata by name.
#ifndef ATTND_ENGINE_MODELS_SAFETENSORS_FILE_H_
#define ATTND_ENGINE_MODELS_SAFETENSORS_FILE_H_

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/safetensors.h"
#include "common/status.h"

namespace attnd::engine {

inline constexpr size_t kModelFilesMax = 64;  // of one option

// InvalidArgument about a tensor or a metadata of a file: `name` and then `what`.
absl::Status WrongPart(absl::string_view name, absl::string_view what);

// SHA-256, 32 bytes. Internal if OpenSSL fails.
absl::StatusOr<std::string> Sha256(absl::string_view bytes);

// Reads the files one after another and calls take(bytes of a whole file) for each.
// InvalidArgument: more than kModelFilesMax paths; or, with "`option` PATH: " before what take
// says, a file that cannot be read, has more than bytes_max bytes, or that take refuses.
absl::Status ReadModelFiles(absl::string_view option, const std::vector<std::string>& paths,
                            uint64_t bytes_max,
                            absl::FunctionRef<absl::Status(absl::string_view bytes)> take);

// A file in memory. InvalidArgument of all methods names the tensor, or the metadata as "metadata
// NAME", and says what is allowed.
class SafetensorsFile {
 public:
  // bytes: a whole file, which must outlive this. InvalidArgument if it is none, or its metadata
  // `format` is another.
  static absl::StatusOr<SafetensorsFile> Decode(absl::string_view bytes, absl::string_view format);

  // Text that is there and not empty.
  absl::StatusOr<std::string> Metadata(const std::string& name) const;
  // The shape of a tensor of that many extents.
  absl::StatusOr<std::vector<uint64_t>> Shape(const std::string& name, size_t extents) const;

  // All elements of a tensor, which must be of this dtype and shape. T: what the dtype is in
  // memory.
  template <typename T>
  absl::Status Read(const std::string& name, absl::string_view dtype,
                    const std::vector<uint64_t>& shape, std::vector<T>* out) const {
    static_assert(std::endian::native == std::endian::little);
    ATTND_ASSIGN_OR_RETURN(const absl::string_view bytes, BytesOf(name, dtype, shape));
    out->resize(bytes.size() / sizeof(T));
    if (!bytes.empty()) std::memcpy(out->data(), bytes.data(), bytes.size());
    return absl::OkStatus();
  }

 private:
  SafetensorsFile(SafetensorsHead head, absl::string_view data)
      : head_(std::move(head)), data_(data) {}
  absl::StatusOr<absl::string_view> BytesOf(const std::string& name, absl::string_view dtype,
                                            const std::vector<uint64_t>& shape) const;

  SafetensorsHead head_;
  absl::string_view data_;
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_MODELS_SAFETENSORS_FILE_H_
