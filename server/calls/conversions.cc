// SPDX-License-Identifier: Apache-2.0
#include "server/calls/conversions.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/checked_math.h"
#include "common/status.h"

namespace attnd::server {
namespace {

using std::chrono::steady_clock;

template <typename... Parts>
absl::Status Invalid(absl::string_view field, const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(field, parts...));
}

absl::Status CheckEnum(const char* field, int value, bool known) {
  if (known) return absl::OkStatus();
  return Invalid(field, " has the unknown value ", value);
}

absl::StatusOr<ModelShape> ShapeFromProto(const v1::ModelShape& proto) {
  ModelShape shape;
  ATTND_ASSIGN_OR_RETURN(shape.dtype, FromProto(proto.dtype(), "model.shape.dtype"));
  shape.layers = proto.layers();
  shape.query_heads = proto.query_heads();
  shape.kv_heads = proto.kv_heads();
  shape.head_dim = proto.head_dim();
  shape.value_dim = proto.value_dim() != 0 ? proto.value_dim() : proto.head_dim();
  shape.latent = proto.latent();
  shape.softmax_scale = proto.softmax_scale();
  if (shape.softmax_scale == 0 && shape.head_dim > 0) {
    shape.softmax_scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  }
  ATTND_RETURN_IF_ERROR(shape.Validate());
  return shape;
}

absl::StatusOr<engine::Shard> ShardFromProto(const v1::Shard& proto) {
  using Kind = engine::Shard::Kind;
  ATTND_RETURN_IF_ERROR(
      CheckEnum("model.shard.kind", proto.kind(), v1::Shard::Kind_IsValid(proto.kind())));
  engine::Shard shard;
  shard.kind = proto.kind() == v1::Shard::KIND_HEADS     ? Kind::kHeads
               : proto.kind() == v1::Shard::KIND_CONTEXT ? Kind::kContext
                                                         : Kind::kWhole;
  shard.index = proto.index();
  shard.count = proto.count() != 0 ? proto.count() : 1;
  if (shard.count > kShardsMax) {
    return Invalid("model.shard.count", " is ", shard.count, "; allowed are 0..", kShardsMax);
  }
  if (shard.index >= shard.count) {
    return Invalid("model.shard.index", " is ", shard.index, "; allowed are 0..", shard.count - 1);
  }
  return shard;
}

// The indexes that make cluster order, for errors.
std::string ClusterIndexNames() {
  std::vector<std::string> names;
  for (const attention::IndexKindInfo& info : attention::kIndexKindInfos) {
    if (!info.clusters.has_value()) continue;
    names.push_back(v1::OpenSequenceRequest::Index_Name(static_cast<int>(info.kind)));
  }
  return absl::StrJoin(names, " or ");
}

// Absent: left to the policy.
absl::StatusOr<std::optional<attention::IndexSet>> IndexesFromProto(
    const v1::OpenSequenceRequest& request) {
  using Request = v1::OpenSequenceRequest;
  ATTND_RETURN_IF_ERROR(
      CheckEnum("layout", request.layout(), Request::Layout_IsValid(request.layout())));
  if (request.indexes_size() > kIndexesMax) {
    return Invalid("indexes", " has ", request.indexes_size(), " entries; allowed are 0..",
                   kIndexesMax);
  }
  attention::IndexSet indexes;
  for (const int index : request.indexes()) {
    const bool known = Request::Index_IsValid(index) && index != Request::INDEX_UNSPECIFIED;
    ATTND_RETURN_IF_ERROR(CheckEnum("indexes", index, known));
    indexes.Add(static_cast<attention::IndexKind>(index));
  }
  const bool clusters = indexes.clustered();
  if (request.layout() == Request::LAYOUT_TOKEN_ORDER) {
    if (!clusters) return indexes;
    return Invalid("layout", " is token order with ", ClusterIndexNames(),
                   "; allowed is cluster order");
  }
  if (request.indexes().empty()) return std::nullopt;
  if (request.layout() == Request::LAYOUT_CLUSTER_ORDER && !clusters) {
    return Invalid("layout", " is cluster order without ", ClusterIndexNames(),
                   " in indexes; allowed is token order");
  }
  return indexes;
}

void IndexesToProto(const attention::IndexSet& indexes, google::protobuf::RepeatedField<int>* out) {
  for (const attention::IndexKind kind : attention::kIndexKinds) {
    if (indexes.Has(kind)) out->Add(static_cast<v1::OpenSequenceRequest::Index>(kind));
  }
}

// True if nothing was said: neither a preset nor a parameter.
bool IsAbsent(const v1::Policy& policy) {
  return policy.preset().empty() && policy.parameters().empty();
}

void ConvertRow(const v1::DecodeRow& proto, const PolicyCatalog& policies, engine::DecodeRow* row) {
  row->sequence_id = proto.sequence_id();
  row->position = proto.position();
  row->query_tokens = proto.query_tokens();
  row->token_ids = {proto.token_ids().data(), static_cast<size_t>(proto.token_ids_size())};
  row->query_only = proto.query_only();
  row->policy.reset();
  row->precheck = absl::OkStatus();
  if (!proto.has_policy() || IsAbsent(proto.policy())) return;
  auto policy = policies.Parse(proto.policy());
  if (policy.ok()) {
    row->policy = *std::move(policy);
  } else {
    row->precheck = policy.status();
  }
}

// k and v of the rows that append. A message that needs k and has none is told what an empty tensor
// lacks; v is absent if the rows' models are latent.
absl::Status ConvertNewTokens(const v1::DecodeRequest& request, engine::DecodeArgs* args) {
  const bool appends = std::any_of(request.rows().begin(), request.rows().end(),
                                   [](const v1::DecodeRow& row) { return !row.query_only(); });
  if (request.has_k() || appends) {
    ATTND_ASSIGN_OR_RETURN(const Tensor3 k, FromProto(request.k(), "k"));
    args->k = k.view;
    args->k_heads = k.heads;
    args->k_head_dim = k.dim;
  }
  if (!request.has_v()) return absl::OkStatus();
  ATTND_ASSIGN_OR_RETURN(const Tensor3 v, FromProto(request.v(), "v"));
  args->v = v.view;
  args->v_heads = v.heads;
  args->v_value_dim = v.dim;
  return absl::OkStatus();
}

// arrival + deadline_us, or nothing where there is no limit or it lies beyond the clock.
std::optional<steady_clock::time_point> Deadline(steady_clock::time_point arrival,
                                                 uint64_t deadline_us) {
  constexpr uint64_t kForever = uint64_t{1} << 50;  // 35 years in microseconds
  if (deadline_us == 0 || deadline_us >= kForever) return std::nullopt;
  return arrival + std::chrono::microseconds(deadline_us);
}

float Micros(uint64_t nanos) { return static_cast<float>(nanos) * 1e-3f; }

void StatsToProto(const attention::RowStats& stats, v1::RowStats* out) {
  out->set_zone_tokens(stats.zone_tokens);
  out->set_exact_tokens(stats.exact_tokens);
  out->set_estimated_tokens(stats.estimated_tokens);
  out->set_dropped_tokens(stats.dropped_tokens);
  if (stats.covered_mass) out->set_covered_mass(*stats.covered_mass);
  if (stats.exact_mass) out->set_exact_mass(*stats.exact_mass);
  if (stats.predicted_error_mean) out->set_predicted_error_mean(*stats.predicted_error_mean);
  if (stats.predicted_error_max) out->set_predicted_error_max(*stats.predicted_error_max);
  out->mutable_tiers()->set_hbm(stats.hbm_tokens);
  out->mutable_tiers()->set_host(stats.host_tokens);
  out->mutable_tiers()->set_ssd(stats.ssd_tokens);
  out->set_missed_tokens(stats.missed_tokens);
  if (stats.missed_mass) out->set_missed_mass(*stats.missed_mass);
  v1::StageTimes* const stages = out->mutable_stages();
  stages->set_score_us(Micros(stats.stages.score));
  stages->set_select_us(Micros(stats.stages.select));
  stages->set_fetch_us(Micros(stats.stages.fetch));
  stages->set_attend_us(Micros(stats.stages.attend));
  stages->set_merge_us(Micros(stats.stages.merge));
}

v1::Shard::Kind ToProto(engine::Shard::Kind kind) {
  switch (kind) {
    case engine::Shard::Kind::kHeads:
      return v1::Shard::KIND_HEADS;
    case engine::Shard::Kind::kContext:
      return v1::Shard::KIND_CONTEXT;
    case engine::Shard::Kind::kWhole:
      break;
  }
  return v1::Shard::KIND_UNSPECIFIED;
}

}  // namespace

absl::StatusOr<DType> FromProto(v1::DType dtype, absl::string_view field) {
  switch (dtype) {
    case v1::DTYPE_BF16:
      return DType::kBf16;
    case v1::DTYPE_FP16:
      return DType::kFp16;
    case v1::DTYPE_FP32:
      return DType::kFp32;
    default:
      return Invalid(field, " is ", static_cast<int>(dtype),
                     "; allowed are DTYPE_BF16, DTYPE_FP16 and DTYPE_FP32");
  }
}

absl::StatusOr<Tensor3> FromProto(const v1::Tensor& tensor, absl::string_view field) {
  Tensor3 result;
  ATTND_ASSIGN_OR_RETURN(result.view.dtype,
                         FromProto(tensor.dtype(), std::string(field) + ".dtype"));
  if (tensor.shape_size() != 3) {
    return Invalid(field, ".shape has ", tensor.shape_size(), " extents; allowed are 3");
  }
  result.tokens = tensor.shape(0);
  result.heads = tensor.shape(1);
  result.dim = tensor.shape(2);
  const auto elements = CheckedProduct({result.tokens, result.heads, result.dim});
  const auto bytes =
      elements ? CheckedProduct({*elements, DTypeBytes(result.view.dtype)}) : std::nullopt;
  if (!elements || !bytes || *bytes == 0) {
    return Invalid(field, ".shape is [", result.tokens, ", ", result.heads, ", ", result.dim,
                   "]: its product is 0 or too large");
  }
  if (tensor.data().size() != *bytes) {
    return Invalid(field, ".data has ", tensor.data().size(), " bytes; the shape makes it ",
                   *bytes);
  }
  result.view.elements = *elements;
  result.view.data = reinterpret_cast<const std::byte*>(tensor.data().data());
  return result;
}

absl::StatusOr<engine::OpenArgs> FromProto(const v1::OpenSequenceRequest& request,
                                           uint64_t max_sequence_tokens,
                                           const PolicyCatalog& policies) {
  if (!request.has_model()) return Invalid("model", " is missing");
  const v1::Model& model = request.model();
  if (model.fingerprint().size() > kFingerprintBytesMax) {
    return Invalid("model.fingerprint", " has ", model.fingerprint().size(),
                   " bytes; allowed are 0..", kFingerprintBytesMax);
  }
  engine::OpenArgs args;
  args.fingerprint = model.fingerprint();
  ATTND_ASSIGN_OR_RETURN(args.shape, ShapeFromProto(model.shape()));
  ATTND_ASSIGN_OR_RETURN(args.shard, ShardFromProto(model.shard()));
  ATTND_ASSIGN_OR_RETURN(args.indexes, IndexesFromProto(request));
  args.cluster_order = request.layout() == v1::OpenSequenceRequest::LAYOUT_CLUSTER_ORDER;
  if (static_cast<uint64_t>(request.token_ids_size()) > max_sequence_tokens) {
    return Invalid("token_ids", " has ", request.token_ids_size(), " entries; allowed are 0..",
                   max_sequence_tokens);
  }
  if (request.has_policy() && !IsAbsent(request.policy())) {
    ATTND_ASSIGN_OR_RETURN(args.policy, policies.Parse(request.policy()));
  }
  return args;
}

absl::StatusOr<engine::ObservedChunk> ObservedFromProto(const v1::AppendKvRequest& request) {
  ATTND_ASSIGN_OR_RETURN(const Tensor3 queries,
                         FromProto(request.observed_queries(), "observed_queries"));
  engine::ObservedChunk chunk;
  chunk.layer = request.layer();
  chunk.tokens = queries.tokens;
  chunk.heads = queries.heads;
  chunk.head_dim = queries.dim;
  chunk.queries = queries.view;
  return chunk;
}

absl::StatusOr<engine::AppendChunk> FromProto(const v1::AppendKvRequest& request) {
  ATTND_ASSIGN_OR_RETURN(const Tensor3 k, FromProto(request.k(), "k"));
  engine::AppendChunk chunk;
  if (request.has_v()) {  // none if the model is latent
    ATTND_ASSIGN_OR_RETURN(const Tensor3 v, FromProto(request.v(), "v"));
    if (k.tokens != v.tokens) {
      return Invalid("v", ".shape[0] is ", v.tokens, "; k has ", k.tokens, " tokens");
    }
    if (k.heads != v.heads) {
      return Invalid("v", ".shape[1] is ", v.heads, "; k has ", k.heads, " heads");
    }
    chunk.v = v.view;
  }
  const auto ids = static_cast<uint64_t>(request.token_ids_size());
  if (ids != 0 && ids != k.tokens) {
    return Invalid("token_ids", " has ", ids, " entries; allowed are none or ", k.tokens);
  }
  chunk.layer = request.layer();
  chunk.first_position = request.first_position();
  chunk.tokens = k.tokens;
  chunk.k = k.view;
  chunk.token_ids = {request.token_ids().data(), ids};
  return chunk;
}

absl::Status FromProto(const v1::DecodeRequest& request, steady_clock::time_point arrival,
                       DecodeStep* step, const PolicyCatalog& policies) {
  step->args = engine::DecodeArgs();
  const int rows = request.rows_size();
  step->rows.resize(static_cast<size_t>(rows));
  for (int i = 0; i < rows; ++i) {
    ConvertRow(request.rows(i), policies, &step->rows[static_cast<size_t>(i)]);
  }
  ATTND_ASSIGN_OR_RETURN(const Tensor3 q, FromProto(request.q(), "q"));
  ATTND_RETURN_IF_ERROR(ConvertNewTokens(request, &step->args));
  step->output_dtype = q.view.dtype;
  if (request.output_dtype() != v1::DTYPE_UNSPECIFIED) {
    ATTND_ASSIGN_OR_RETURN(step->output_dtype, FromProto(request.output_dtype(), "output_dtype"));
  }
  step->args.layer = request.layer();
  step->args.rows = step->rows;
  step->args.q = q.view;
  step->args.q_heads = q.heads;
  step->args.q_head_dim = q.dim;
  step->args.deadline = Deadline(arrival, request.deadline_us());
  return absl::OkStatus();
}

v1::DType ToProto(DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return v1::DTYPE_BF16;
    case DType::kFp16:
      return v1::DTYPE_FP16;
    case DType::kFp32:
      return v1::DTYPE_FP32;
  }
  return v1::DTYPE_UNSPECIFIED;
}

void ToProto(const attention::Policy& policy, v1::Policy* out) {
  out->set_preset(policy.preset);
  for (const auto& [key, value] : policy.Parameters()) (*out->mutable_parameters())[key] = value;
}

void ToProto(const absl::Status& status, v1::Status* out) {
  out->set_code(static_cast<int32_t>(status.code()));
  const absl::string_view message = CutMessage(status.message());
  out->set_message(message.data(), message.size());
}

void ToProto(const engine::SequenceInfo& info, v1::SequenceInfo* out) {
  const ModelShape& shape = info.args.shape;
  out->set_sequence_id(info.id);
  out->mutable_model()->set_fingerprint(info.args.fingerprint);
  v1::ModelShape* const model = out->mutable_model()->mutable_shape();
  model->set_layers(shape.layers);
  model->set_query_heads(shape.query_heads);
  model->set_kv_heads(shape.kv_heads);
  model->set_head_dim(shape.head_dim);
  model->set_value_dim(shape.value_dim);
  model->set_dtype(ToProto(shape.dtype));
  model->set_softmax_scale(shape.softmax_scale);
  model->set_latent(shape.latent);
  v1::Shard* const shard = out->mutable_model()->mutable_shard();
  shard->set_kind(ToProto(info.args.shard.kind));
  shard->set_index(info.args.shard.index);
  shard->set_count(info.args.shard.count);
  if (info.args.policy) ToProto(*info.args.policy, out->mutable_policy());
  if (info.args.backend != nullptr) out->set_backend(std::string(info.args.backend->name()));
  out->set_committed_tokens(info.committed_tokens);
  out->set_segmented_tokens(info.segmented_tokens);
  out->set_segments(info.segments);
  out->set_resident_bytes(info.resident_bytes);
  out->mutable_layer_tokens()->Add(info.layer_tokens.begin(), info.layer_tokens.end());
  if (!info.args.indexes.has_value()) return;
  IndexesToProto(*info.args.indexes, out->mutable_indexes());
  out->set_layout(info.args.indexes->token_order() ? v1::OpenSequenceRequest::LAYOUT_TOKEN_ORDER
                                                   : v1::OpenSequenceRequest::LAYOUT_CLUSTER_ORDER);
}

void ToProto(const attention::Policy& policy, const attention::IndexSet& indexes,
             v1::PresetInfo* out) {
  ToProto(policy, out->mutable_policy());
  for (const attention::ParameterInfo& parameter : attention::ParametersWithRanges(policy)) {
    (*out->mutable_allowed())[parameter.name] = parameter.allowed;
  }
  IndexesToProto(indexes, out->mutable_indexes());
  if (indexes.clustered()) {
    out->set_layout(v1::OpenSequenceRequest::LAYOUT_CLUSTER_ORDER);
  } else if (!policy.AllowsClusterOrder()) {
    out->set_layout(v1::OpenSequenceRequest::LAYOUT_TOKEN_ORDER);
  }
}

void ToProto(const engine::DecodeResult& result, v1::DecodeResponse* reply) {
  reply->mutable_rows()->Clear();
  for (const engine::DecodeRowResult& row : result.rows) {
    v1::RowResult* const out = reply->add_rows();
    ToProto(row.status, out->mutable_status());
    if (row.status.ok()) StatsToProto(row.stats, out->mutable_stats());
  }
}

absl::string_view CutMessage(absl::string_view message) {
  if (message.size() <= kStatusMessageBytesMax) return message;
  size_t length = kStatusMessageBytesMax;
  const auto continues = [&](size_t i) {
    return (static_cast<unsigned char>(message[i]) & 0xC0u) == 0x80u;
  };
  while (length > 0 && continues(length)) --length;
  return message.substr(0, length);
}

}  // namespace attnd::server
