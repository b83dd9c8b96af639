// SPDX-License-Identifier: Apache-2.0
#include "ctl/describe.h"

#include <set>
#include <utility>

#include "common/dtype.h"
#include "common/status.h"
#include "storage/files/segment_layout.h"

namespace attnd::ctl {
namespace {

using storage::SegmentRecord;
using storage::SequenceRecord;

Value DescribeListed(const CatalogueContents& contents, const SequenceRecord& record) {
  const auto chain = contents.ChainOf(record.last);
  uint64_t files = 1, bytes = record.tail_file_bytes;
  for (const SegmentRecord& segment : chain.ok() ? *chain : std::vector<SegmentRecord>()) {
    ++files;
    bytes += segment.file_bytes;
  }
  Value entry = Value::Object();
  entry.Set("sealed_id", record.id)
      .Set("tenant", record.tenant)
      .Set("tokens", record.tokens)
      .Set("files", files)
      .Set("bytes", bytes)
      .Set("sealed", TimeText(record.sealed_unix_s))
      .Set("complete", chain.ok());
  return entry;
}

Value DescribeRecord(const SegmentRecord& record) {
  Value entry = Value::Object();
  entry.Set("chain", ChainText(record.chain))
      .Set("parent", ChainText(record.parent))
      .Set("tenant", record.tenant)
      .Set("first_position", record.first_position)
      .Set("tokens", record.tokens)
      .Set("file", record.file)
      .Set("bytes", record.file_bytes)
      .Set("used", TimeText(record.used_unix_s));
  return entry;
}

const char* KindText(storage::SegmentKind kind) {
  return kind == storage::SegmentKind::kTail ? "tail" : "segment";
}

const char* ShardText(engine::Shard::Kind kind) {
  switch (kind) {
    case engine::Shard::Kind::kWhole:
      return "whole";
    case engine::Shard::Kind::kHeads:
      return "heads";
    case engine::Shard::Kind::kContext:
      return "context";
  }
  return "unknown";
}

Value DescribeHeader(const storage::SegmentFileHeader& header) {
  Value value = Value::Object();
  value.Set("format", storage::kSegmentFormat)
      .Set("kind", KindText(header.kind))
      .Set("chain", ChainText(header.chain))
      .Set("parent", ChainText(header.parent))
      .Set("first_position", header.first_position)
      .Set("tokens", header.tokens)
      .Set("unclustered", header.unclustered)
      .Set("layers", header.layers)
      .Set("kv_heads", header.kv_heads)
      .Set("index_head_bytes", header.index_head_bytes)
      .Set("page_bytes", header.page_bytes)
      .Set("pages", header.pages)
      .Set("metadata_bytes", header.metadata.size());
  const auto layout = storage::LayOut(header, header.metadata.size());
  if (!layout.ok()) return value;  // such a file could not be opened
  value.Set("indexes_offset", layout->indexes_offset)
      .Set("index_stride_bytes", layout->index_stride_bytes)
      .Set("pages_offset", layout->pages_offset)
      .Set("run_stride_bytes", layout->run_stride_bytes)
      .Set("table_offset", layout->table_offset)
      .Set("table_bytes", layout->table_bytes)
      .Set("footer_offset", layout->footer_offset)
      .Set("file_bytes", layout->file_bytes);
  return value;
}

Value DescribeModel(const engine::OpenArgs& args) {
  Value shard = Value::Object();
  shard.Set("kind", ShardText(args.shard.kind))
      .Set("index", args.shard.index)
      .Set("count", args.shard.count);
  Value value = Value::Object();
  value.Set("fingerprint", args.fingerprint)
      .Set("layers", args.shape.layers)
      .Set("query_heads", args.shape.query_heads)
      .Set("kv_heads", args.shape.kv_heads)
      .Set("head_dim", args.shape.head_dim)
      .Set("value_dim", args.shape.value_dim)
      .Set("latent", args.shape.latent)
      .Set("dtype", DTypeName(args.shape.dtype))
      .Set("softmax_scale", double{args.shape.softmax_scale})
      .Set("shard", std::move(shard));
  return value;
}

Value DescribeRuns(const std::vector<engine::TokenIds::Run>& runs, bool token_ids) {
  Value list = Value::List();
  for (const engine::TokenIds::Run& run : runs) {
    Value entry = Value::Object();
    entry.Set("first_position", run.first_position).Set("tokens", run.ids.size());
    if (token_ids) {
      Value ids = Value::List();
      for (const uint32_t id : run.ids) ids.Add(id);
      entry.Set("ids", std::move(ids));
    }
    list.Add(std::move(entry));
  }
  return list;
}

Value DescribePolicy(const attention::Policy& policy) {
  Value parameters = Value::Object();
  for (const auto& [name, text] : policy.Parameters()) parameters.Set(name, text);
  Value value = Value::Object();
  value.Set("preset", policy.preset).Set("parameters", std::move(parameters));
  return value;
}

Value DescribeMetadata(const OpenedFile& opened, bool token_ids) {
  const engine::FileMetadata& metadata = opened.metadata;
  Value value = Value::Object();
  value.Set("tenant", metadata.tenant)
      .Set("model", DescribeModel(metadata.args))
      .Set("token_id_runs", DescribeRuns(metadata.token_ids, token_ids));
  if (opened.header().kind == storage::SegmentKind::kTail) {
    value.Set("sealed_id", metadata.sealed_id)
        .Set("tokens", metadata.tokens)
        .Set("sealed", TimeText(metadata.sealed_unix_s))
        .Set("policy", DescribePolicy(metadata.args.policy.value()));
    return value;
  }
  Value bounds = Value::List();
  for (const float bound : metadata.key_bounds) bounds.Add(double{bound});
  value.Set("key_bounds", std::move(bounds));
  return value;
}

template <typename Record>
Value DescribeFileOf(const DataReader& reader, uint64_t number, const Record& record,
                     bool token_ids, storage::IoQueue* queue) {
  Value value = Value::Object();
  value.Set("path", reader.folder().SegmentPath(number));
  const auto opened = reader.OpenFile(number, queue);
  absl::Status status = opened.status();
  if (status.ok()) status = CheckIs(record, *opened);
  if (!status.ok()) value.Set("error", std::string(status.message()));
  if (opened.ok()) value.Set("file", DescribeFile(*opened, token_ids));
  return value;
}

}  // namespace

Value DescribeCatalogue(const CatalogueContents& contents, const std::optional<std::string>& tenant,
                        bool segments) {
  const auto wanted = [&](const auto& record) {
    return !tenant.has_value() || record.tenant == *tenant;
  };
  Value sequences = Value::List(), listed_segments = Value::List();
  uint64_t sequence_count = 0, files = 0, bytes = 0;
  for (const auto& [id, record] : contents.sequences) {
    if (!wanted(record)) continue;
    sequences.Add(DescribeListed(contents, record));
    ++sequence_count, ++files, bytes += record.tail_file_bytes;
  }
  for (const auto& [chain, record] : contents.segments) {
    if (!wanted(record)) continue;
    listed_segments.Add(DescribeRecord(record));
    ++files, bytes += record.file_bytes;
  }
  Value value = Value::Object();
  value.Set("sequences", std::move(sequences));
  if (segments) value.Set("segments", std::move(listed_segments));
  Value total = Value::Object();
  // Segments are shared: files and bytes are less than the sequences' together.
  total.Set("sequences", sequence_count).Set("files", files).Set("bytes", bytes);
  value.Set("total", std::move(total));
  return value;
}

absl::StatusOr<Value> DescribeSequence(const DataReader& reader, uint64_t sealed_id, bool token_ids,
                                       storage::IoQueue* queue) {
  ATTND_ASSIGN_OR_RETURN(const CatalogueContents contents, reader.ReadCatalogue());
  ATTND_ASSIGN_OR_RETURN(const SequenceRecord record, contents.Find(sealed_id));
  const auto chain = contents.ChainOf(record.last);
  Value value = DescribeListed(contents, record);
  value.Set("last", ChainText(record.last)).Set("used", TimeText(record.used_unix_s));
  if (!chain.ok()) value.Set("error", std::string(chain.status().message()));
  Value segments = Value::List();
  for (const SegmentRecord& segment : chain.ok() ? *chain : std::vector<SegmentRecord>()) {
    Value entry = DescribeFileOf(reader, segment.file, segment, token_ids, queue);
    entry.Set("record", DescribeRecord(segment));
    segments.Add(std::move(entry));
  }
  value.Set("segments", std::move(segments));
  value.Set("tail", DescribeFileOf(reader, record.tail_file, record, token_ids, queue));
  return value;
}

Value DescribeFile(const OpenedFile& opened, bool token_ids) {
  Value value = Value::Object();
  value.Set("header", DescribeHeader(opened.header()))
      .Set("metadata", DescribeMetadata(opened, token_ids));
  return value;
}

}  // namespace attnd::ctl
