// SPDX-License-Identifier: Apache-2.0
#include "server/calls/sequence_conversions.h"

#include <chrono>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "attention/backend.h"
#include "attention/policy/policy.h"
#include "attention/segment/index_set.h"
#include "common/model_shape.h"
#include "common/status.h"
#include "server/calls/conversions.h"

namespace attnd::server {
namespace {

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

// A size of 0 is the default.
absl::StatusOr<attention::TreeSizes> TreeFromProto(const v1::TreeOptions& tree) {
  attention::TreeSizes sizes;
  if (tree.leaf_tokens() != 0) sizes.leaf_tokens = tree.leaf_tokens();
  if (tree.fan() != 0) sizes.fan = tree.fan();
  if (tree.levels() != 0) sizes.levels = tree.levels();
  ATTND_RETURN_IF_ERROR(sizes.Validate());
  return sizes;
}

void ToProto(const attention::TreeSizes& sizes, v1::TreeOptions* out) {
  out->set_leaf_tokens(sizes.leaf_tokens);
  out->set_fan(sizes.fan);
  out->set_levels(sizes.levels);
}

void IndexesToProto(const attention::IndexSet& indexes, google::protobuf::RepeatedField<int>* out) {
  for (const attention::IndexKind kind : attention::kIndexKinds) {
    if (indexes.Has(kind)) out->Add(static_cast<v1::OpenSequenceRequest::Index>(kind));
  }
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
  if (request.has_tree()) {
    ATTND_ASSIGN_OR_RETURN(args.tree, TreeFromProto(request.tree()));
  }
  args.cluster_order = request.layout() == v1::OpenSequenceRequest::LAYOUT_CLUSTER_ORDER;
  if (static_cast<uint64_t>(request.token_ids_size()) > max_sequence_tokens) {
    return Invalid("token_ids", " has ", request.token_ids_size(), " entries; allowed are 0..",
                   max_sequence_tokens);
  }
  args.lease = std::chrono::seconds(request.lease_seconds());
  if (request.has_policy() && !IsAbsent(request.policy())) {
    ATTND_ASSIGN_OR_RETURN(args.policy, policies.Parse(request.policy()));
  }
  return args;
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
  out->set_lease_seconds(static_cast<uint32_t>(info.args.lease.count()));
  out->set_lease_left_seconds(
      static_cast<uint32_t>(std::chrono::ceil<std::chrono::seconds>(info.lease_left).count()));
  out->mutable_layer_tokens()->Add(info.layer_tokens.begin(), info.layer_tokens.end());
  if (!info.args.indexes.has_value()) return;
  IndexesToProto(*info.args.indexes, out->mutable_indexes());
  if (info.args.indexes->Has(attention::IndexKind::kTree)) {
    ToProto(info.args.indexes->tree_sizes(), out->mutable_tree());
  }
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

}  // namespace attnd::server
