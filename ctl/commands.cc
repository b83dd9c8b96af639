// SPDX-License-Identifier: Apache-2.0
#include "ctl/commands.h"

#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "common/status.h"
#include "ctl/data_reader.h"
#include "ctl/describe.h"
#include "ctl/describe_size.h"
#include "ctl/export.h"
#include "ctl/import.h"
#include "ctl/index_time.h"
#include "ctl/metered_queue.h"
#include "ctl/model_config.h"
#include "ctl/new_secret.h"
#include "ctl/progress.h"
#include "ctl/rebuild.h"
#include "ctl/size.h"
#include "ctl/verify.h"

namespace attnd::ctl {
namespace {

using storage::IoQueue;

absl::StatusOr<std::unique_ptr<IoQueue>> MakeQueue() { return storage::MakeIoQueue({}); }

absl::StatusOr<std::unique_ptr<DataReader>> OpenReader(const CommandLine& line) {
  return DataReader::Open(storage::MakePosixFileSystem(), line.data_dir);
}

absl::StatusOr<std::unique_ptr<Client>> Connect(const CommandLine& line) {
  ClientOptions options;
  options.target = line.server;
  options.tenant = line.tenant.value_or("");
  return Client::Connect(options);
}

// ---- on a data folder ----

absl::StatusOr<Outcome> ListFolder(const CommandLine& line) {
  ATTND_ASSIGN_OR_RETURN(const auto reader, OpenReader(line));
  ATTND_ASSIGN_OR_RETURN(const CatalogueContents contents, reader->ReadCatalogue());
  return Outcome{DescribeCatalogue(contents, line.tenant, line.segments)};
}

absl::StatusOr<Outcome> Inspect(const CommandLine& line) {
  ATTND_ASSIGN_OR_RETURN(const auto queue, MakeQueue());
  uint64_t id = 0;
  if (!absl::SimpleAtoi(line.arguments[0], &id)) {
    const auto files = storage::MakePosixFileSystem();
    ATTND_ASSIGN_OR_RETURN(const OpenedFile opened,
                           OpenSegmentFile(files.get(), queue.get(), line.arguments[0]));
    return Outcome{DescribeFile(opened, line.token_ids)};
  }
  ATTND_ASSIGN_OR_RETURN(const auto reader, OpenReader(line));
  ATTND_ASSIGN_OR_RETURN(Value report, DescribeSequence(*reader, id, line.token_ids, queue.get()));
  return Outcome{std::move(report)};
}

Value Describe(const VerifyResult& result) {
  Value files = Value::List(), sequences = Value::List(), unnamed = Value::List();
  for (const BadFile& file : result.bad_files) {
    Value needed = Value::List();
    for (const uint64_t id : file.sequences) needed.Add(id);
    files.Add(Value::Object()
                  .Set("path", file.path)
                  .Set("state", file.missing ? "missing" : "damaged")
                  .Set("needed_by", std::move(needed))
                  .Set("why", file.what));
  }
  for (const BrokenSequence& sequence : result.broken_sequences) {
    sequences.Add(Value::Object().Set("sealed_id", sequence.id).Set("why", sequence.what));
  }
  for (const std::string& path : result.unnamed_files) unnamed.Add(path);
  return Value::Object()
      .Set("files", result.files)
      .Set("bytes", result.bytes)
      .Set("fine", result.fine())
      .Set("bad_files", std::move(files))
      .Set("broken_sequences", std::move(sequences))
      .Set("unnamed_files", std::move(unnamed));
}

absl::StatusOr<Outcome> RunVerify(const CommandLine& line) {
  ATTND_ASSIGN_OR_RETURN(const auto reader, OpenReader(line));
  ATTND_ASSIGN_OR_RETURN(auto inner, MakeQueue());
  std::optional<Progress> progress;
  MeteredQueue queue(std::move(inner), line.mib_per_s << 20, [&](uint64_t bytes) {
    if (progress.has_value()) progress->Add(bytes);
  });
  auto result = Verify(*reader, line.ids, &queue, [&](uint64_t bytes) {
    progress.emplace("verify", Progress::Unit::kBytes, bytes, ProgressTerminal());
  });
  progress.reset();
  ATTND_RETURN_IF_ERROR(result.status());
  if (!reader->files().direct()) {
    std::fputs("attnctl: the file system refuses O_DIRECT: bytes came by way of the page cache\n",
               stderr);
  }
  return Outcome{Describe(*result), !result->fine()};
}

absl::StatusOr<Outcome> RunRebuild(const CommandLine& line) {
  const auto files = storage::MakePosixFileSystem();
  ATTND_ASSIGN_OR_RETURN(const auto queue, MakeQueue());
  std::optional<Progress> progress;
  const auto on_done = [&](uint64_t done, uint64_t total) {
    if (!progress.has_value()) {
      progress.emplace("read", Progress::Unit::kFiles, total, ProgressTerminal());
    }
    progress->MoveTo(done);
    return absl::OkStatus();
  };
  auto rebuilt = RebuildCatalogue(line.data_dir, files.get(), queue.get(), on_done, line.orphans);
  progress.reset();
  ATTND_RETURN_IF_ERROR(rebuilt.status());
  Value untaken = Value::List();
  for (const UntakenFile& file : rebuilt->plan.untaken) {
    untaken.Add(Value::Object()
                    .Set("file", file.number)
                    .Set("why", file.why)
                    .Set("harmless", file.harmless));
  }
  if (rebuilt->orphan_files > 0) {
    std::fputs(
        "attnctl: if sealed sequences are missing, they may be in orphans/, which a server "
        "empties: `attnctl rebuild-catalogue --orphans` takes these files back first\n",
        stderr);
  }
  const bool wrong = !rebuilt->plan.whole();
  return Outcome{Value::Object()
                     .Set("sequences", rebuilt->plan.sequences.size())
                     .Set("segments", rebuilt->plan.segments.size())
                     .Set("unneeded_segments", rebuilt->plan.unneeded_segments)
                     .Set("old_catalogue", rebuilt->old_catalogue)
                     .Set("orphan_files", rebuilt->orphan_files)
                     .Set("orphan_bytes", rebuilt->orphan_bytes)
                     .Set("quarantined_files", std::move(untaken)),
                 wrong};
}

absl::StatusOr<Outcome> RunNewSecret(const CommandLine& line) {
  const auto files = storage::MakePosixFileSystem();
  ATTND_ASSIGN_OR_RETURN(const std::string old, NewSecret(line.data_dir, files.get()));
  return Outcome{Value::Object().Set("secret", line.data_dir + "/secret").Set("old_secret", old)};
}

absl::StatusOr<Outcome> RunExport(const CommandLine& line) {
  ATTND_ASSIGN_OR_RETURN(const auto reader, OpenReader(line));
  ATTND_ASSIGN_OR_RETURN(const auto queue, MakeQueue());
  std::optional<Progress> progress;
  auto result =
      Export(*reader, line.ids[0], line.out, queue.get(), [&](uint64_t bytes, uint64_t total) {
        if (!progress.has_value()) {
          progress.emplace("export", Progress::Unit::kBytes, total, ProgressTerminal());
        }
        progress->MoveTo(bytes);
      });
  progress.reset();
  ATTND_RETURN_IF_ERROR(result.status());
  return Outcome{Value::Object()
                     .Set("path", line.out)
                     .Set("tokens", result->tokens)
                     .Set("known_token_ids", result->known_ids)
                     .Set("layers", result->layers)
                     .Set("bytes", result->bytes)};
}

// ---- on nothing ----

absl::StatusOr<ModelConfig> ReadModel(const CommandLine& line) {
  std::optional<DType> dtype;
  if (!line.dtype.empty()) {
    dtype = DTypeOf(line.dtype);
    if (!dtype.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--dtype is '", line.dtype, "'; allowed are bf16, fp16 and fp32"));
    }
  }
  return ReadModelConfig(line.model, dtype);
}

absl::StatusOr<attention::IndexSet> IndexesNamed(const std::string& name) {
  if (name.empty()) return attention::kTreeIndexes;
  std::string names;
  for (const attention::IndexKind kind : attention::kIndexKinds) {
    if (name == attention::IndexName(kind)) return attention::IndexSet{kind};
    absl::StrAppend(&names, names.empty() ? "" : ", ", attention::IndexName(kind));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--index is '", name, "'; allowed is one of ", names));
}

absl::StatusOr<Outcome> RunSize(const CommandLine& line) {
  ATTND_ASSIGN_OR_RETURN(const ModelConfig model, ReadModel(line));
  Load load;
  load.shape = model.shape;
  ATTND_ASSIGN_OR_RETURN(load.indexes, IndexesNamed(line.index));
  load.sequences = line.sequences;
  load.context_tokens = line.context;
  load.generated_tokens = line.generated;
  load.token_ids = line.token_ids;
  load.memory_bytes = line.memory_bytes;
  load.page_memory_bytes = line.page_memory_bytes;
  load.gpu_memory_bytes = line.gpu_memory_bytes;
  load.gpu_page_memory_bytes = line.gpu_page_memory_bytes;
  ATTND_ASSIGN_OR_RETURN(const LoadSize size, SizeOf(load));
  const auto time = MeasureIndexing(load.shape, load.indexes, load.segment_tokens);
  if (!time.ok() && !absl::IsUnimplemented(time.status())) return time.status();
  return Outcome{DescribeSize(model, load, size, time.ok() ? std::optional(*time) : std::nullopt),
                 !size.fits};
}

// ---- on a running server ----

// They are drawn from 63 bits, which JSON's numbers do not hold.
std::string SequenceIdOf(uint64_t id) { return absl::StrCat(id); }

absl::StatusOr<Outcome> ListServer(const CommandLine& line) {
  ATTND_ASSIGN_OR_RETURN(const auto client, Connect(line));
  ATTND_ASSIGN_OR_RETURN(const auto open, client->ListSequences());
  ATTND_ASSIGN_OR_RETURN(const auto sealed, client->ListSealed());
  Value sequences = Value::List(), sealed_sequences = Value::List();
  for (const v1::SequenceInfo& info : open) {
    sequences.Add(Value::Object()
                      .Set("sequence_id", SequenceIdOf(info.sequence_id()))
                      .Set("tokens", uint64_t{info.committed_tokens()})
                      .Set("segmented_tokens", uint64_t{info.segmented_tokens()})
                      .Set("resident_bytes", uint64_t{info.resident_bytes()}));
  }
  for (const v1::SealedSequence& entry : sealed) {
    sealed_sequences.Add(Value::Object()
                             .Set("sealed_id", uint64_t{entry.sealed_id()})
                             .Set("tokens", uint64_t{entry.tokens()})
                             .Set("sealed", TimeText(entry.sealed_unix_s())));
  }
  return Outcome{
      Value::Object().Set("open", std::move(sequences)).Set("sealed", std::move(sealed_sequences))};
}

absl::StatusOr<Outcome> RunSeal(const CommandLine& line) {
  ATTND_ASSIGN_OR_RETURN(const auto client, Connect(line));
  ATTND_ASSIGN_OR_RETURN(const auto sealed, client->SealSequence(line.ids[0]));
  return Outcome{Value::Object()
                     .Set("sealed_id", uint64_t{sealed.sealed_id()})
                     .Set("tokens", uint64_t{sealed.tokens()})
                     .Set("segments", uint64_t{sealed.segments()})
                     .Set("written_segments", uint64_t{sealed.written_segments()})
                     .Set("written_bytes", uint64_t{sealed.written_bytes()})};
}

absl::StatusOr<Outcome> RunDrop(const CommandLine& line) {
  ATTND_ASSIGN_OR_RETURN(const auto client, Connect(line));
  ATTND_RETURN_IF_ERROR(client->DropSealed(line.ids[0]));
  return Outcome{Value::Object().Set("dropped", line.ids[0])};
}

absl::StatusOr<Outcome> RunImport(const CommandLine& line) {
  ATTND_ASSIGN_OR_RETURN(const auto client, Connect(line));
  ImportOptions options;
  options.seal = !line.no_seal;
  options.keep_open = line.keep_open;
  std::optional<Progress> progress;
  auto result =
      Import(client.get(), line.arguments[0], options, [&](uint64_t bytes, uint64_t total) {
        if (!progress.has_value()) {
          progress.emplace("import", Progress::Unit::kBytes, total, ProgressTerminal());
        }
        progress->MoveTo(bytes);
      });
  progress.reset();
  ATTND_RETURN_IF_ERROR(result.status());
  Value report = Value::Object();
  report.Set("sequence_id", SequenceIdOf(result->sequence_id)).Set("open", result->open);
  if (result->sealed_id != 0) report.Set("sealed_id", result->sealed_id);
  report.Set("tokens", result->tokens).Set("tokens_present", result->tokens_present);
  return Outcome{std::move(report)};
}

}  // namespace

absl::StatusOr<Outcome> RunCommand(const CommandLine& line) {
  if (line.command == "list") return line.server.empty() ? ListFolder(line) : ListServer(line);
  if (line.command == "inspect") return Inspect(line);
  if (line.command == "verify") return RunVerify(line);
  if (line.command == "rebuild-catalogue") return RunRebuild(line);
  if (line.command == "new-secret") return RunNewSecret(line);
  if (line.command == "export") return RunExport(line);
  if (line.command == "seal") return RunSeal(line);
  if (line.command == "drop") return RunDrop(line);
  if (line.command == "import") return RunImport(line);
  if (line.command == "size") return RunSize(line);
  return absl::InternalError(line.command + " is not done");
}

}  // namespace attnd::ctl
