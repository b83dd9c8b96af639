// SPDX-License-Identifier: Apache-2.0
#include "ctl/import.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/safetensors.h"
#include "common/status.h"
#include "ctl/kv_file.h"
#include "storage/catalogue/small_file.h"
#include "storage/io/errno_status.h"

namespace attnd::ctl {
namespace {

using storage::SmallFile;

constexpr uint64_t kChunkBytes = uint64_t{32} << 20;  // of all layers; one token at the least
constexpr auto kPrefillTimeout = std::chrono::hours(1);

absl::StatusOr<uint64_t> SizeOf(const SmallFile& file) {
  struct stat info = {};
  if (fstat(file.get(), &info) != 0) {
    return storage::ErrnoStatus(errno, absl::StrCat("look at ", file.path()));
  }
  return info.st_size;
}

absl::Status ReadAll(const SmallFile& file, uint64_t offset, void* to, uint64_t bytes) {
  ATTND_ASSIGN_OR_RETURN(const size_t done, file.Read(to, bytes, offset));
  if (done == bytes) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(file.path(), " ended while it was read"));
}

// A file that was found to be a sequence.
struct SequenceFile {
  SmallFile file;
  KvFile layout;
  uint64_t data_offset = 0;
  std::vector<int64_t> ids;  // [tokens], or none
};

absl::Status ReadIds(SequenceFile* source) {
  if (!source->layout.token_ids.has_value()) return absl::OkStatus();
  source->ids.resize(source->layout.tokens);
  ATTND_RETURN_IF_ERROR(ReadAll(source->file, source->data_offset + *source->layout.token_ids,
                                source->ids.data(), source->ids.size() * sizeof(int64_t)));
  const bool in_range = std::all_of(source->ids.begin(), source->ids.end(), [](int64_t id) {
    return id >= -1 && id <= int64_t{std::numeric_limits<uint32_t>::max()};
  });
  if (in_range) return absl::OkStatus();
  return absl::InvalidArgumentError("token_ids has an entry beyond -1..2^32 - 1");
}

absl::StatusOr<SequenceFile> OpenSequenceFile(const std::string& path) {
  ATTND_ASSIGN_OR_RETURN(SmallFile file, SmallFile::Open(path, O_RDONLY));
  ATTND_ASSIGN_OR_RETURN(const uint64_t file_bytes, SizeOf(file));
  std::string length(kHeadLengthBytes, '\0');
  ATTND_ASSIGN_OR_RETURN(const size_t read, file.Read(length.data(), length.size(), 0));
  length.resize(read);
  ATTND_ASSIGN_OR_RETURN(const uint64_t json_bytes, DecodeHeadLength(length, file_bytes));
  std::string json(json_bytes, '\0');
  ATTND_RETURN_IF_ERROR(ReadAll(file, kHeadLengthBytes, json.data(), json.size()));
  const uint64_t data_offset = kHeadLengthBytes + json_bytes;
  ATTND_ASSIGN_OR_RETURN(const SafetensorsHead head, DecodeHead(json, file_bytes - data_offset));
  ATTND_ASSIGN_OR_RETURN(KvFile layout, ParseKvFile(head));
  SequenceFile source{std::move(file), std::move(layout), data_offset, {}};
  ATTND_RETURN_IF_ERROR(ReadIds(&source));
  return source;
}

class Upload {
 public:
  Upload(Client* client, const SequenceFile* source, const BytesUploaded& uploaded)
      : client_(client), source_(*source), told_(uploaded) {}

  absl::StatusOr<v1::OpenSequenceResponse> Open() {
    v1::OpenSequenceRequest request;
    *request.mutable_model() = source_.layout.model;
    *request.mutable_policy() = source_.layout.policy;
    for (const int64_t id : source_.ids) {
      if (id < 0) break;
      request.add_token_ids(static_cast<uint32_t>(id));
    }
    ATTND_ASSIGN_OR_RETURN(auto opened, client_->OpenSequence(request));
    sequence_id_ = opened.sequence_id();
    return opened;
  }

  absl::Status Send(uint64_t first) {
    const uint64_t token_bytes = source_.layout.token_bytes();
    const uint64_t tokens_max = std::max<uint64_t>(1, kChunkBytes / token_bytes);
    for (uint64_t end = 0; first < source_.layout.tokens; first = end) {
      end = EndOfChunk(first, tokens_max);
      ATTND_RETURN_IF_ERROR(SendChunk(first, end - first));
      if (told_) told_(end * token_bytes, source_.layout.tokens * token_bytes);
    }
    AppendOptions options;
    options.timeout = kPrefillTimeout;
    return client_->AppendKv(sequence_id_, source_.layout.model.shape(), {}, {}, options).status();
  }

 private:
  bool Known(uint64_t token) const { return !source_.ids.empty() && source_.ids[token] >= 0; }

  // Ids go with all tokens of a chunk, or with none.
  uint64_t EndOfChunk(uint64_t first, uint64_t tokens_max) const {
    uint64_t end = first + 1;
    const uint64_t end_max = std::min(source_.layout.tokens, first + tokens_max);
    while (end < end_max && Known(end) == Known(first)) ++end;
    return end;
  }

  absl::Status SendChunk(uint64_t first, uint64_t tokens) {
    const KvFile& layout = source_.layout;
    buffer_.resize(tokens * layout.token_bytes());
    std::vector<KvBlock> blocks;
    char* to = buffer_.data();
    const auto read = [&](uint64_t begin, uint64_t row_bytes) -> absl::StatusOr<absl::string_view> {
      const absl::string_view bytes(to, tokens * row_bytes);
      ATTND_RETURN_IF_ERROR(
          ReadAll(source_.file, source_.data_offset + begin + first * row_bytes, to, bytes.size()));
      to += bytes.size();
      return bytes;
    };
    for (uint32_t layer = 0; layer < layout.model.shape().layers(); ++layer) {
      ATTND_ASSIGN_OR_RETURN(const auto k, read(layout.keys[layer], layout.key_row_bytes));
      absl::string_view v;
      if (!layout.values.empty()) {
        ATTND_ASSIGN_OR_RETURN(v, read(layout.values[layer], layout.value_row_bytes));
      }
      blocks.push_back({.layer = layer, .first_position = first, .tokens = tokens, .k = k, .v = v});
    }
    std::vector<uint32_t> ids;
    for (uint64_t token = first; Known(first) && token < first + tokens; ++token) {
      ids.push_back(static_cast<uint32_t>(source_.ids[token]));
    }
    AppendOptions options;
    options.prefill_complete = false;
    return client_->AppendKv(sequence_id_, layout.model.shape(), blocks, ids, options).status();
  }

  Client* const client_;
  const SequenceFile& source_;
  const BytesUploaded& told_;
  uint64_t sequence_id_ = 0;
  std::vector<char> buffer_;
};

absl::Status SendAndSeal(Client* client, Upload* upload, const ImportOptions& options,
                         ImportResult* result) {
  ATTND_RETURN_IF_ERROR(upload->Send(result->tokens_present));
  if (!options.seal) return absl::OkStatus();
  ATTND_ASSIGN_OR_RETURN(const auto sealed, client->SealSequence(result->sequence_id));
  result->sealed_id = sealed.sealed_id();
  result->tokens = sealed.tokens();
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ImportResult> Import(Client* client, const std::string& path,
                                    const ImportOptions& options, const BytesUploaded& uploaded) {
  ATTND_ASSIGN_OR_RETURN(const SequenceFile source, OpenSequenceFile(path));
  Upload upload(client, &source, uploaded);
  ATTND_ASSIGN_OR_RETURN(const auto opened, upload.Open());
  ImportResult result;
  result.sequence_id = opened.sequence_id();
  result.tokens_present = opened.tokens_present();
  result.tokens = source.layout.tokens;
  const absl::Status status = SendAndSeal(client, &upload, options, &result);
  result.open = status.ok() && (!options.seal || options.keep_open);
  if (!result.open) {
    const absl::Status closed = client->CloseSequence(result.sequence_id);
    if (status.ok()) ATTND_RETURN_IF_ERROR(closed);
  }
  ATTND_RETURN_IF_ERROR(status);
  return result;
}

}  // namespace attnd::ctl
