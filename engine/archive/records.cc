// SPDX-License-Identifier: Apache-2.0
#include "engine/archive/records.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "attention/policy_state/label_choice.h"
#include "attention/segment/pages.h"
#include "common/status.h"
#include "engine/archive/archive.pb.h"
#include "engine/models/safetensors_file.h"

namespace attnd::engine {
namespace {

using attention::kTailBlockTokens;
using attention::PageGeometry;
using storage::SegmentFileHeader;
using storage::SegmentKind;

// In Model.indexes; no set of indexes has these bits (attention::kTreeSizesBit).
constexpr uint32_t kIndexesGiven = 1;
constexpr uint32_t kSections = uint32_t{1} << 31;  // attention::SegmentForm::sections
constexpr uint64_t kPositionsMax = uint64_t{1} << 40;

absl::Status Damaged(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("the file's metadata has ", what));
}

// Of values that a checksum says were written so, and that this program does not know.
absl::Status Newer(absl::string_view what) {
  return absl::FailedPreconditionError(
      absl::StrCat("the file's metadata has ", what,
                   ", which this version does not know or allow: another one wrote the file. Run "
                   "that one; the file stays where it is"));
}

// The indexes of a file; files from before the field was there have clusters.
absl::StatusOr<attention::IndexSet> DecodeIndexes(uint32_t bits) {
  if (bits == 0) return attention::kClusterIndexes;
  if ((bits & kIndexesGiven) == 0) return Damaged("unknown indexes");
  const auto indexes = attention::IndexSet::FromBits(bits & ~(kIndexesGiven | kSections));
  if (!indexes.has_value()) return Newer(absl::StrCat("indexes ", bits));
  if (!indexes->Validate().ok()) return Damaged("indexes that exclude each other");
  if ((bits & kSections) != 0 && indexes->cluster_form() != attention::ClusterForm::kTree) {
    return Damaged("sections without a tree");
  }
  if ((bits & kSections) != 0 && !indexes->has_sections()) {
    return Newer("sections over a tree of two levels");
  }
  return *indexes;
}

archive::Model EncodeModel(const OpenArgs& args, bool sections) {
  archive::Model model;
  model.set_fingerprint(args.fingerprint);
  model.set_layers(args.shape.layers);
  model.set_query_heads(args.shape.query_heads);
  model.set_kv_heads(args.shape.kv_heads);
  model.set_head_dim(args.shape.head_dim);
  model.set_value_dim(args.shape.value_dim);
  model.set_dtype(static_cast<uint32_t>(args.shape.dtype));
  model.set_softmax_scale(args.shape.softmax_scale);
  model.set_shard_kind(static_cast<uint32_t>(args.shard.kind));
  model.set_shard_index(args.shard.index);
  model.set_shard_count(args.shard.count);
  model.set_latent(args.shape.latent);
  if (args.indexes.has_value()) {
    model.set_indexes(args.indexes->bits() | kIndexesGiven | (sections ? kSections : 0));
  }
  model.set_feature_maps(args.model_parts.feature_maps_id);
  return model;
}

absl::StatusOr<OpenArgs> DecodeModel(const archive::Model& model) {
  OpenArgs args;
  args.fingerprint = model.fingerprint();
  args.shape.layers = model.layers();
  args.shape.query_heads = model.query_heads();
  args.shape.kv_heads = model.kv_heads();
  args.shape.head_dim = model.head_dim();
  args.shape.value_dim = model.value_dim();
  args.shape.softmax_scale = model.softmax_scale();
  args.shape.latent = model.latent();
  if (model.dtype() < static_cast<uint32_t>(DType::kBf16)) return Damaged("no dtype");
  if (model.dtype() > static_cast<uint32_t>(DType::kFp32)) {
    return Newer(absl::StrCat("dtype ", model.dtype()));
  }
  args.shape.dtype = static_cast<DType>(model.dtype());
  if (model.shard_kind() > static_cast<uint32_t>(Shard::Kind::kContext)) {
    return Newer(absl::StrCat("shard kind ", model.shard_kind()));
  }
  args.shard = {static_cast<Shard::Kind>(model.shard_kind()), model.shard_index(),
                model.shard_count()};
  if (const absl::Status shape = args.shape.Validate(); !shape.ok()) {
    return Damaged(shape.message());
  }
  ATTND_ASSIGN_OR_RETURN(args.indexes, DecodeIndexes(model.indexes()));
  args.model_parts.feature_maps_id = model.feature_maps();
  if (args.model_parts.feature_maps_id.empty() ==
      args.indexes->Needs(attention::ModelPart::kFeatureMaps)) {
    return Damaged("feature maps without a summary, or a summary without");
  }
  return args;
}

absl::StatusOr<std::vector<TokenIds::Run>> DecodeRuns(const archive::Metadata& message) {
  std::vector<TokenIds::Run> runs;
  uint64_t end = 0;
  for (const archive::TokenRun& run : message.token_runs()) {
    const auto count = static_cast<uint64_t>(run.ids_size());
    if (count == 0 || run.first_position() < end || run.first_position() > kPositionsMax) {
      return Damaged("token ids in no order");
    }
    end = run.first_position() + count;
    runs.push_back({run.first_position(), {run.ids().begin(), run.ids().end()}});
  }
  return runs;
}

absl::Status DecodeSealed(const archive::SealedSequence& sealed, FileMetadata* metadata) {
  if (sealed.id() == 0 || sealed.tokens() > kPositionsMax) return Damaged("no sequence's numbers");
  metadata->sealed_id = sealed.id();
  metadata->tokens = sealed.tokens();
  metadata->sealed_unix_s = sealed.sealed_unix_s();
  const std::map<std::string, std::string> parameters(sealed.policy().parameters().begin(),
                                                      sealed.policy().parameters().end());
  auto policy = attention::ParsePolicy(sealed.policy().preset(), parameters);
  if (!policy.ok()) return Newer(absl::StrCat("a policy (", policy.status().message(), ")"));
  metadata->args.policy = *std::move(policy);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> LabelChannelsId(const attention::Segment& segment) {
  if (!segment.indexes().Has(attention::IndexKind::kLabels)) return std::string();
  const auto choice = attention::LabelChoiceOf(segment);
  return Sha256({reinterpret_cast<const char*>(choice->channels.data()),
                 choice->channels.size() * sizeof(choice->channels[0])});
}

std::string EncodeMetadata(const FileMetadata& metadata) {
  archive::Metadata message;
  message.set_tenant(metadata.tenant);
  *message.mutable_model() = EncodeModel(metadata.args, metadata.sections);
  for (const TokenIds::Run& run : metadata.token_ids) {
    archive::TokenRun* out = message.add_token_runs();
    out->set_first_position(run.first_position);
    out->mutable_ids()->Add(run.ids.begin(), run.ids.end());
  }
  message.set_label_channels(metadata.label_channels);
  message.mutable_key_bounds()->Add(metadata.key_bounds.begin(), metadata.key_bounds.end());
  if (metadata.sealed_id != 0) {
    archive::SealedSequence* sealed = message.mutable_sealed();
    sealed->set_id(metadata.sealed_id);
    sealed->set_tokens(metadata.tokens);
    sealed->set_sealed_unix_s(metadata.sealed_unix_s);
    const attention::Policy& policy = metadata.args.policy.value();
    sealed->mutable_policy()->set_preset(policy.preset);
    for (const auto& [name, value] : policy.Parameters()) {
      // Versions that do not know it read the files of those who do not use it.
      if (name == "quantile" && policy.quantile == 0) continue;
      (*sealed->mutable_policy()->mutable_parameters())[name] = value;
    }
  }
  return message.SerializeAsString();
}

absl::StatusOr<FileMetadata> DecodeMetadata(const std::string& bytes, SegmentKind kind) {
  archive::Metadata message;
  if (!message.ParseFromString(bytes)) return Damaged("no message in it");
  FileMetadata metadata;
  metadata.tenant = message.tenant();
  ATTND_ASSIGN_OR_RETURN(metadata.args, DecodeModel(message.model()));
  ATTND_ASSIGN_OR_RETURN(metadata.token_ids, DecodeRuns(message));
  if (kind == SegmentKind::kTail) {
    ATTND_RETURN_IF_ERROR(DecodeSealed(message.sealed(), &metadata));
    return metadata;
  }
  metadata.sections = (message.model().indexes() & kSections) != 0;
  metadata.label_channels = message.label_channels();
  metadata.key_bounds.assign(message.key_bounds().begin(), message.key_bounds().end());
  const bool finite = std::all_of(metadata.key_bounds.begin(), metadata.key_bounds.end(),
                                  [](float x) { return std::isfinite(x) && x >= 0; });
  if (metadata.key_bounds.size() != metadata.args.shape.layers || !finite) {
    return Damaged("no bound of each layer's keys");
  }
  return metadata;
}

std::vector<TokenIds::Run> RunsWithin(std::span<const TokenIds::Run> runs, uint64_t begin,
                                      uint64_t end) {
  std::vector<TokenIds::Run> within;
  for (const TokenIds::Run& run : runs) {
    const uint64_t first = std::max(begin, run.first_position);
    const uint64_t last = std::min(end, run.first_position + run.ids.size());
    if (first >= last) continue;
    const auto from = run.ids.begin() + static_cast<ptrdiff_t>(first - run.first_position);
    within.push_back({first, {from, from + static_cast<ptrdiff_t>(last - first)}});
  }
  return within;
}

SegmentFileHeader HeaderOf(const attention::Segment& segment) {
  SegmentFileHeader header;
  header.kind = SegmentKind::kClusters;
  header.first_position = segment.first_position();
  header.tokens = segment.tokens();
  header.unclustered = segment.unclustered();
  header.layers = segment.shape().layers;
  header.kv_heads = segment.shape().kv_heads;
  header.index_head_bytes = segment.layout().head_bytes;
  header.page_bytes = static_cast<uint32_t>(PageGeometry(segment.shape()).page_bytes());
  header.pages = static_cast<uint32_t>(PageGeometry::PagesFor(segment.tokens()));
  return header;
}

// ---- tails ----

TailBytes::TailBytes(const HistorySnapshot& history)
    : history_(history),
      first_(FirstTailPosition(history.view->tail_begin)),
      pages_(static_cast<uint32_t>(TailPages(history.view->tail_begin, history.committed))) {}

SegmentFileHeader TailBytes::Header() const {
  const ModelShape& shape = history_.view->shape;
  SegmentFileHeader header;
  header.kind = SegmentKind::kTail;
  header.first_position = history_.view->tail_begin;
  header.tokens = static_cast<uint32_t>(history_.committed - history_.view->tail_begin);
  header.layers = shape.layers;
  header.kv_heads = shape.kv_heads;
  header.page_bytes = static_cast<uint32_t>(PageGeometry(shape).page_bytes());
  header.pages = pages_;
  return header;
}

const std::byte* TailBytes::Pages(uint64_t head) const {
  const attention::SequenceView& view = *history_.view;
  const PageGeometry geometry(view.shape);
  const auto layer = static_cast<uint32_t>(head / view.shape.kv_heads);
  const auto kv_head = static_cast<uint32_t>(head % view.shape.kv_heads);
  run_.assign(pages_ * geometry.page_bytes(), std::byte{0});
  // Row by row: what lies behind the committed positions is being written.
  for (uint64_t position = view.tail_begin; position < history_.committed; ++position) {
    const uint64_t to = position - first_, place = position % kTailBlockTokens;
    const std::byte* pages = view.tail[to / kTailBlockTokens]->pages(layer, kv_head);
    geometry.CopyToken(pages, place, run_.data(), to);
  }
  return run_.data();
}

absl::Status AppendTail(const SegmentFileHeader& header, const std::byte* pages,
                        std::span<const TokenIds::Run> token_ids, Sequence* sequence) {
  constexpr WriterId kArchive = 0;  // nobody else's, and nobody else knows the sequence yet
  const ModelShape& shape = sequence->shape();
  const PageGeometry geometry(shape);
  const uint64_t first = FirstTailPosition(header.first_position);
  const uint64_t run_bytes = uint64_t{header.pages} * header.page_bytes;
  std::vector<std::byte> keys(uint64_t{header.tokens} * shape.kv_heads * geometry.key_row_bytes);
  std::vector<std::byte> values(uint64_t{header.tokens} * shape.kv_heads *
                                geometry.value_row_bytes);
  for (uint32_t layer = 0; layer < shape.layers && header.tokens > 0; ++layer) {
    for (uint64_t token = 0; token < header.tokens; ++token) {
      const uint64_t from = header.first_position + token - first;
      for (uint32_t head = 0; head < shape.kv_heads; ++head) {
        const std::byte* run = pages + (uint64_t{layer} * shape.kv_heads + head) * run_bytes;
        const uint64_t to = token * shape.kv_heads + head;
        std::memcpy(keys.data() + to * geometry.key_row_bytes, run + geometry.KeyOffset(from),
                    geometry.key_row_bytes);
        if (!geometry.stores_values()) continue;
        std::memcpy(values.data() + to * geometry.value_row_bytes, run + geometry.ValueOffset(from),
                    geometry.value_row_bytes);
      }
    }
    NewTokens tokens;
    tokens.layer = layer;
    tokens.first_position = header.first_position;
    tokens.tokens = header.tokens;
    tokens.keys = keys.data();
    tokens.values = values.data();
    const auto appended = sequence->Append(kArchive, tokens);
    if (absl::IsInvalidArgument(appended.status())) {  // of numbers that no upload could have had
      return absl::DataLossError(absl::StrCat("a sealed tail: ", appended.status().message()));
    }
    ATTND_RETURN_IF_ERROR(appended.status());
  }
  ATTND_RETURN_IF_ERROR(sequence->AddTokenIds(token_ids));
  sequence->ReleaseWriter(kArchive);
  return absl::OkStatus();
}

}  // namespace attnd::engine
