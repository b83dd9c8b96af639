// SPDX-License-Identifier: Apache-2.0
#include "ctl/export.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/safetensors.h"
#include "common/status.h"
#include "ctl/kv_file.h"
#include "ctl/layer_rows.h"
#include "storage/catalogue/small_file.h"
#include "storage/io/errno_status.h"

namespace attnd::ctl {
namespace {

using storage::SmallFile;

constexpr uint64_t kIdsAtOnce = 1u << 16;

// The files of a sequence, and what they say together.
struct SealedFiles {
  std::vector<uint64_t> files;  // segments, first one first, then the tail
  engine::OpenArgs args;
  uint64_t tokens = 0;
  std::vector<engine::TokenIds::Run> token_ids;
  uint64_t known_ids = 0;
};

void AddIds(std::vector<engine::TokenIds::Run> runs, SealedFiles* sealed) {
  for (engine::TokenIds::Run& run : runs) {
    sealed->known_ids += run.ids.size();
    sealed->token_ids.push_back(std::move(run));
  }
}

// A file that a record names and that is not there is a loss, no unknown id.
absl::StatusOr<OpenedFile> OpenNamed(const DataReader& reader, uint64_t number,
                                     storage::IoQueue* queue) {
  auto opened = reader.OpenFile(number, queue);
  if (!absl::IsNotFound(opened.status())) return opened;
  return absl::DataLossError(opened.status().message());
}

// Opens each file once, so that what is missing or another's is found before anything is written.
absl::StatusOr<SealedFiles> FindSealedFiles(const DataReader& reader, uint64_t sealed_id,
                                            storage::IoQueue* queue) {
  ATTND_ASSIGN_OR_RETURN(const CatalogueContents contents, reader.ReadCatalogue());
  ATTND_ASSIGN_OR_RETURN(const auto record, contents.Find(sealed_id));
  ATTND_ASSIGN_OR_RETURN(const auto chain, contents.ChainOf(record.last));
  SealedFiles sealed;
  uint64_t end = 0;
  for (const storage::SegmentRecord& segment : chain) {
    ATTND_ASSIGN_OR_RETURN(OpenedFile opened, OpenNamed(reader, segment.file, queue));
    ATTND_RETURN_IF_ERROR(CheckIs(segment, opened));
    sealed.files.push_back(segment.file);
    AddIds(engine::RunsWithin(opened.metadata.token_ids, end, end + segment.tokens), &sealed);
    end += segment.tokens;
    if (sealed.files.size() == 1) sealed.args.shape = opened.metadata.args.shape;
    if (opened.metadata.args.shape == sealed.args.shape) continue;
    return absl::DataLossError("the sequence's segments are of different models");
  }
  ATTND_ASSIGN_OR_RETURN(OpenedFile tail, OpenNamed(reader, record.tail_file, queue));
  ATTND_RETURN_IF_ERROR(CheckIs(record, tail));
  const bool fits = chain.empty() || tail.metadata.args.shape == sealed.args.shape;
  if (!fits || tail.header().first_position != end) {
    return absl::DataLossError("the sequence's tail does not go on where its segments end");
  }
  sealed.files.push_back(record.tail_file);
  sealed.args = std::move(tail.metadata.args);
  sealed.tokens = record.tokens;
  AddIds(engine::RunsWithin(tail.metadata.token_ids, end, record.tokens), &sealed);
  return sealed;
}

// Writes the tensors, wherever they begin.
class Writer {
 public:
  Writer(const SmallFile* to, const KvFile& file, uint64_t head_bytes, const BytesWritten& written)
      : to_(to), file_(file), head_bytes_(head_bytes), told_(written) {}

  absl::Status WriteFile(const OpenedFile& opened, storage::IoQueue* queue) {
    if (opened.header().tokens == 0) return absl::OkStatus();
    ATTND_ASSIGN_OR_RETURN(LayerRows rows, LayerRows::Make(&opened, queue));
    const uint64_t first = opened.header().first_position;
    for (uint32_t layer = 0; layer < file_.model.shape().layers(); ++layer) {
      ATTND_ASSIGN_OR_RETURN(const LayerRows::Layer content, rows.Read(layer, queue));
      ATTND_RETURN_IF_ERROR(Write(content.keys, file_.keys[layer] + first * file_.key_row_bytes));
      if (content.values.empty()) continue;  // of a latent model
      ATTND_RETURN_IF_ERROR(
          Write(content.values, file_.values[layer] + first * file_.value_row_bytes));
    }
    return absl::OkStatus();
  }

  absl::Status WriteIds(std::span<const engine::TokenIds::Run> runs) {
    if (!file_.token_ids.has_value()) return absl::OkStatus();
    auto run = runs.begin();
    for (uint64_t first = 0; first < file_.tokens; first += kIdsAtOnce) {
      const uint64_t end = std::min(file_.tokens, first + kIdsAtOnce);
      std::vector<int64_t> ids(end - first, -1);
      for (; run != runs.end() && run->first_position < end; ++run) {
        const uint64_t from = std::max(first, run->first_position);
        const uint64_t run_end = run->first_position + run->ids.size();
        for (uint64_t position = from; position < std::min(end, run_end); ++position) {
          ids[position - first] = run->ids[position - run->first_position];
        }
        if (run_end > end) break;  // it goes on behind
      }
      ATTND_RETURN_IF_ERROR(
          Write(std::as_bytes(std::span(ids)), *file_.token_ids + first * sizeof(int64_t)));
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Write(std::span<const std::byte> bytes, uint64_t offset) {
    ATTND_RETURN_IF_ERROR(to_->Write(bytes.data(), bytes.size(), head_bytes_ + offset));
    done_ += bytes.size();
    if (told_) told_(done_, file_.data_bytes);
    return absl::OkStatus();
  }

  const SmallFile* const to_;
  const KvFile& file_;
  const uint64_t head_bytes_;
  const BytesWritten& told_;
  uint64_t done_ = 0;
};

// A file beside `path` that was not there before. Its name is drawn, as whatever lies beside `path`
// may be somebody's: path.tmp, or what another export is writing.
absl::StatusOr<SmallFile> NewBeside(const std::string& path) {
  constexpr int kTries = 8;
  std::random_device random;
  for (int tries = 1;; ++tries) {
    const std::string name = absl::StrCat(path, ".", absl::Hex(random(), absl::kZeroPad8), ".tmp");
    auto file = SmallFile::Open(name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW);
    if (!absl::IsAlreadyExists(file.status()) || tries == kTries) return file;
  }
}

absl::Status WriteTo(const SmallFile& to, const DataReader& reader, const SealedFiles& sealed,
                     const KvFile& file, storage::IoQueue* queue, const BytesWritten& written) {
  ATTND_ASSIGN_OR_RETURN(const SafetensorsHead what, HeadOf(file));
  ATTND_ASSIGN_OR_RETURN(const std::string head, EncodeHead(what));
  ATTND_RETURN_IF_ERROR(to.Write(head.data(), head.size(), 0));
  Writer writer(&to, file, head.size(), written);
  for (const uint64_t number : sealed.files) {
    ATTND_ASSIGN_OR_RETURN(const OpenedFile opened, OpenNamed(reader, number, queue));
    ATTND_RETURN_IF_ERROR(writer.WriteFile(opened, queue));
  }
  ATTND_RETURN_IF_ERROR(writer.WriteIds(sealed.token_ids));
  return to.Sync();
}

// Does not replace a file that came meanwhile, where the file system can tell.
absl::Status Publish(const std::string& temporary, const std::string& path) {
  const char *const from = temporary.c_str(), *const to = path.c_str();
  const bool renamed = renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE) == 0 ||
                       (errno == EINVAL && rename(from, to) == 0);
  if (!renamed) {
    return storage::ErrnoStatus(errno, absl::StrCat("rename ", temporary, " to ", path));
  }
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  ATTND_ASSIGN_OR_RETURN(
      const SmallFile names,
      SmallFile::Open(folder.empty() ? "." : folder.string(), O_RDONLY | O_DIRECTORY));
  return names.Sync();
}

}  // namespace

absl::StatusOr<ExportResult> Export(const DataReader& reader, uint64_t sealed_id,
                                    const std::string& path, storage::IoQueue* queue,
                                    const BytesWritten& written) {
  if (access(path.c_str(), F_OK) == 0) {
    return absl::AlreadyExistsError(absl::StrCat(path, " is there already"));
  }
  ATTND_ASSIGN_OR_RETURN(const SealedFiles sealed, FindSealedFiles(reader, sealed_id, queue));
  ATTND_ASSIGN_OR_RETURN(const KvFile file,
                         PlanKvFile(sealed.args, sealed.tokens, sealed.known_ids > 0));
  ATTND_ASSIGN_OR_RETURN(const SmallFile temporary, NewBeside(path));
  absl::Status status = WriteTo(temporary, reader, sealed, file, queue, written);
  if (status.ok()) status = Publish(temporary.path(), path);
  if (!status.ok()) {
    unlink(temporary.path().c_str());
    return status;
  }
  std::error_code error;
  return ExportResult{sealed.tokens, sealed.known_ids, file.model.shape().layers(),
                      std::filesystem::file_size(path, error)};
}

}  // namespace attnd::ctl
