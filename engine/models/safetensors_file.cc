// SPDX-License-Identifier: Apache-2.0
#include "engine/models/safetensors_file.h"

#include <openssl/evp.h>

#include <filesystem>
#include <fstream>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace attnd::engine {
namespace {

absl::StatusOr<std::string> ReadFile(const std::string& path, uint64_t bytes_max) {
  std::error_code error;
  const uint64_t bytes = std::filesystem::file_size(path, error);
  if (error) return absl::InvalidArgumentError(error.message());
  if (bytes > bytes_max) {
    return absl::InvalidArgumentError(
        absl::StrCat("the file has ", bytes, " bytes; allowed are ", bytes_max));
  }
  std::string content(bytes, '\0');
  std::ifstream file(path, std::ios::binary);
  if (!file.read(content.data(), static_cast<std::streamsize>(bytes))) {
    return absl::InvalidArgumentError("the file cannot be read");
  }
  return content;
}

std::string ShapeText(const std::vector<uint64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

}  // namespace

absl::Status WrongPart(absl::string_view name, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(name, " ", what));
}

absl::StatusOr<std::string> Sha256(absl::string_view bytes) {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned size = 0;
  if (EVP_Digest(bytes.data(), bytes.size(), digest, &size, EVP_sha256(), nullptr) != 1) {
    return absl::InternalError("OpenSSL's SHA-256 failed");
  }
  return std::string(reinterpret_cast<const char*>(digest), size);
}

absl::Status ReadModelFiles(absl::string_view option, const std::vector<std::string>& paths,
                            uint64_t bytes_max,
                            absl::FunctionRef<absl::Status(absl::string_view bytes)> take) {
  if (paths.size() > kModelFilesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(option, " has ", paths.size(), " files; allowed are 0..", kModelFilesMax));
  }
  for (const std::string& path : paths) {
    const auto bytes = ReadFile(path, bytes_max);
    const absl::Status taken = bytes.ok() ? take(*bytes) : bytes.status();
    if (!taken.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(option, " ", path, ": ", taken.message()));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::Decode(absl::string_view bytes,
                                                        absl::string_view format) {
  ATTND_ASSIGN_OR_RETURN(const uint64_t length, DecodeHeadLength(bytes, bytes.size()));
  const absl::string_view data = bytes.substr(kHeadLengthBytes + length);
  ATTND_ASSIGN_OR_RETURN(SafetensorsHead head,
                         DecodeHead(bytes.substr(kHeadLengthBytes, length), data.size()));
  SafetensorsFile file(std::move(head), data);
  ATTND_ASSIGN_OR_RETURN(const std::string found, file.Metadata("format"));
  if (found == format) return file;
  return WrongPart("metadata format",
                   absl::StrCat("is \"", found.substr(0, 64), "\"; allowed is ", format));
}

absl::StatusOr<std::string> SafetensorsFile::Metadata(const std::string& name) const {
  const auto found = head_.metadata.find(name);
  if (found != head_.metadata.end() && !found->second.empty()) return found->second;
  return WrongPart(absl::StrCat("metadata ", name), "is missing");
}

absl::StatusOr<std::vector<uint64_t>> SafetensorsFile::Shape(const std::string& name,
                                                             size_t extents) const {
  const auto found = head_.tensors.find(name);
  if (found == head_.tensors.end()) return WrongPart(name, "is missing");
  if (found->second.shape.size() == extents) return found->second.shape;
  return WrongPart(name, absl::StrCat("has the shape ", ShapeText(found->second.shape),
                                      "; allowed are ", extents, " extents"));
}

absl::StatusOr<absl::string_view> SafetensorsFile::BytesOf(
    const std::string& name, absl::string_view dtype, const std::vector<uint64_t>& shape) const {
  const auto found = head_.tensors.find(name);
  if (found == head_.tensors.end()) return WrongPart(name, "is missing");
  const TensorEntry& entry = found->second;
  // DecodeHead has compared bytes and shape, and both with the file's size.
  if (entry.dtype == dtype && entry.shape == shape) return data_.substr(entry.begin, entry.bytes());
  return WrongPart(name, absl::StrCat("is ", entry.dtype, " ", ShapeText(entry.shape),
                                      "; allowed is ", dtype, " ", ShapeText(shape)));
}

}  // namespace attnd::engine
