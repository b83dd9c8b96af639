// SPDX-License-Identifier: Apache-2.0
#include "ctl/verify.h"

#include <map>
#include <utility>
#include <variant>

#include "common/status.h"

namespace attnd::ctl {
namespace {

using storage::SegmentRecord;
using storage::SequenceRecord;

// A file, the record that names it, and who needs it.
struct Task {
  std::variant<SegmentRecord, SequenceRecord> record;
  std::set<uint64_t> sequences;
};
using Tasks = std::map<uint64_t, Task>;  // by file

uint64_t BytesOf(const Task& task) {
  if (const auto* segment = std::get_if<SegmentRecord>(&task.record)) return segment->file_bytes;
  return std::get<SequenceRecord>(task.record).tail_file_bytes;
}

// Whether the catalogue still names that file so.
bool IsNamed(const CatalogueContents& contents, uint64_t file, const Task& task) {
  if (const auto* segment = std::get_if<SegmentRecord>(&task.record)) {
    const auto found = contents.segments.find(segment->chain);
    return found != contents.segments.end() && found->second.file == file;
  }
  const auto found = contents.sequences.find(std::get<SequenceRecord>(task.record).id);
  return found != contents.sequences.end() && found->second.tail_file == file;
}

void AddSequence(const CatalogueContents& contents, const SequenceRecord& record, Tasks* tasks,
                 VerifyResult* result) {
  Task& tail = (*tasks)[record.tail_file];
  tail.record = record;
  tail.sequences.insert(record.id);
  const auto chain = contents.ChainOf(record.last);
  if (!chain.ok()) {
    result->broken_sequences.push_back({record.id, std::string(chain.status().message())});
  }
  for (const SegmentRecord& segment : chain.ok() ? *chain : std::vector<SegmentRecord>()) {
    Task& task = (*tasks)[segment.file];
    task.record = segment;
    task.sequences.insert(record.id);
  }
}

absl::StatusOr<Tasks> MakeTasks(const CatalogueContents& contents, const std::vector<uint64_t>& ids,
                                VerifyResult* result) {
  Tasks tasks;
  for (const uint64_t id : ids) {
    ATTND_ASSIGN_OR_RETURN(const SequenceRecord record, contents.Find(id));
    AddSequence(contents, record, &tasks, result);
  }
  if (!ids.empty()) return tasks;
  for (const auto& [id, record] : contents.sequences) {
    AddSequence(contents, record, &tasks, result);
  }
  // Those that no whole chain holds.
  for (const auto& [chain, record] : contents.segments) tasks[record.file].record = record;
  return tasks;
}

absl::Status VerifyFile(const DataReader& reader, uint64_t number, const Task& task,
                        storage::IoQueue* queue) {
  ATTND_ASSIGN_OR_RETURN(const OpenedFile opened, reader.OpenFile(number, queue));
  ATTND_RETURN_IF_ERROR(
      std::visit([&](const auto& record) { return CheckIs(record, opened); }, task.record));
  return opened.file->Verify(queue, {});
}

absl::Status FindUnnamed(const DataReader& reader, const std::vector<storage::StoredFile>& before,
                         VerifyResult* result) {
  ATTND_ASSIGN_OR_RETURN(const CatalogueContents now, reader.ReadCatalogue());
  std::set<uint64_t> named;
  for (const auto& [chain, record] : now.segments) named.insert(record.file);
  for (const auto& [id, record] : now.sequences) named.insert(record.tail_file);
  // Those that are still there: the others were dropped meanwhile.
  ATTND_ASSIGN_OR_RETURN(const auto after, reader.folder().ListSegments());
  std::set<std::string> there;
  for (const storage::StoredFile& file : after) there.insert(file.path);
  for (const storage::StoredFile& file : before) {
    const bool unnamed = file.temporary || named.count(file.number) == 0;
    if (unnamed && there.count(file.path) != 0) result->unnamed_files.push_back(file.path);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<VerifyResult> Verify(const DataReader& reader, const std::vector<uint64_t>& ids,
                                    storage::IoQueue* queue, const BytesToRead& bytes_to_read) {
  VerifyResult result;
  // Before the catalogue is read: what is written later is not looked at.
  ATTND_ASSIGN_OR_RETURN(const auto stored, reader.folder().ListSegments());
  ATTND_ASSIGN_OR_RETURN(const CatalogueContents contents, reader.ReadCatalogue());
  ATTND_ASSIGN_OR_RETURN(const Tasks tasks, MakeTasks(contents, ids, &result));
  for (const auto& [number, task] : tasks) result.bytes += BytesOf(task);
  result.files = tasks.size();
  if (bytes_to_read) bytes_to_read(result.bytes);
  for (const auto& [number, task] : tasks) {
    const absl::Status status = VerifyFile(reader, number, task, queue);
    if (status.ok()) continue;
    // The server may have dropped it, or put it away, since.
    ATTND_ASSIGN_OR_RETURN(const CatalogueContents now, reader.ReadCatalogue());
    if (!IsNamed(now, number, task)) continue;
    result.bad_files.push_back({reader.folder().SegmentPath(number), std::string(status.message()),
                                absl::IsNotFound(status), task.sequences});
  }
  if (ids.empty()) ATTND_RETURN_IF_ERROR(FindUnnamed(reader, stored, &result));
  return result;
}

}  // namespace attnd::ctl
