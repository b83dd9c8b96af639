// SPDX-License-Identifier: Apache-2.0
//
// What the files of models that a server is started with (feature maps, label channels) share: they
// are safetensors files, read within a limit of bytes, with tensors and metadata found by name.
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

// InvalidArgument about a tensor or metadata of a file. The message is `name`, then `what`.
absl::Status WrongPart(absl::string_view name, absl::string_view what);

// SHA-256, 32 bytes. Internal if OpenSSL fails.
absl::StatusOr<std::string> Sha256(absl::string_view bytes);

// Reads the files one after another and calls take(bytes of the whole file) for each.
// InvalidArgument for more than kModelFilesMax paths, and for a file that cannot be read, has more
// than bytes_max bytes, or that take refuses; the message about a file begins with "`option` PATH:
// ".
absl::Status ReadModelFiles(absl::string_view option, const std::vector<std::string>& paths,
                            uint64_t bytes_max,
                            absl::FunctionRef<absl::Status(absl::string_view bytes)> take);

// A file in memory. The InvalidArgument of each method names the tensor, or the metadata as
// "metadata NAME", and says what is allowed.
class SafetensorsFile {
 public:
  // bytes: a whole file, which must outlive this object. InvalidArgument if it is no safetensors
  // file, or if its metadata `format` is not `format`.
  static absl::StatusOr<SafetensorsFile> Decode(absl::string_view bytes, absl::string_view format);

  // The metadata `name`, which must be present and not empty.
  absl::StatusOr<std::string> Metadata(const std::string& name) const;
  // The shape of a tensor, which must have `extents` extents.
  absl::StatusOr<std::vector<uint64_t>> Shape(const std::string& name, size_t extents) const;

  // All elements of a tensor, which must have this dtype and shape. T: the dtype's type in memory.
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
