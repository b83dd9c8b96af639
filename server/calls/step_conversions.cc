// SPDX-License-Identifier: Apache-2.0
#include "server/calls/step_conversions.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "common/status.h"
#include "server/calls/conversions.h"

namespace attnd::server {
namespace {

using std::chrono::steady_clock;

void ConvertRow(const v1::DecodeRow& proto, const PolicyCatalog& policies, engine::DecodeRow* row) {
  row->sequence_id = proto.sequence_id();
  row->position = proto.position();
  row->query_tokens = proto.query_tokens();
  row->token_ids = {proto.token_ids().data(), static_cast<size_t>(proto.token_ids_size())};
  row->query_only = proto.query_only();
  row->want_kv_head_errors = proto.want_kv_head_errors();
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

// in_memory: the tensor's data lies in memory that is shared.
absl::StatusOr<Tensor3> ConvertTensor(bool in_memory, const v1::Tensor& tensor,
                                      absl::string_view field) {
  return in_memory ? WithoutDataFromProto(tensor, field) : FromProto(tensor, field);
}

// k and v of the rows that append. A message that needs k and has none is told what an empty tensor
// lacks; v is absent if the rows' models are latent.
absl::Status ConvertNewTokens(const v1::DecodeRequest& request, engine::DecodeArgs* args) {
  const bool appends = std::any_of(request.rows().begin(), request.rows().end(),
                                   [](const v1::DecodeRow& row) { return !row.query_only(); });
  if (request.has_k() || appends) {
    ATTND_ASSIGN_OR_RETURN(const Tensor3 k,
                           ConvertTensor(request.begin_pass().has_memory(), request.k(), "k"));
    args->k = k.view;
    args->k_heads = k.heads;
    args->k_head_dim = k.dim;
  }
  if (!request.has_v()) return absl::OkStatus();
  ATTND_ASSIGN_OR_RETURN(const Tensor3 v,
                         ConvertTensor(request.begin_pass().has_memory(), request.v(), "v"));
  args->v = v.view;
  args->v_heads = v.heads;
  args->v_value_dim = v.dim;
  return absl::OkStatus();
}

// A tensor of a later layer of a pass, whose first layer's stands in the other arguments. It may
// have data alone.
absl::Status ConvertLater(const v1::Tensor& tensor, absl::string_view field,
                          engine::TensorView* view, uint64_t* heads, uint64_t* dim) {
  if (tensor.dtype() != v1::DTYPE_UNSPECIFIED || tensor.shape_size() != 0) {
    ATTND_ASSIGN_OR_RETURN(const Tensor3 whole, FromProto(tensor, field));
    *view = whole.view;
    *heads = whole.heads;
    *dim = whole.dim;
    return absl::OkStatus();
  }
  const uint64_t bytes = view->elements * DTypeBytes(view->dtype);  // as they were sent before
  if (tensor.data().size() != bytes) {
    return Invalid(field, ".data has ", tensor.data().size(), " bytes; the pass's first layer has ",
                   bytes);
  }
  view->data = reinterpret_cast<const std::byte*>(tensor.data().data());
  return absl::OkStatus();
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
  out->set_index_rows(stats.index_rows);
  out->set_clusters(stats.clusters);
  if (stats.missed_mass) out->set_missed_mass(*stats.missed_mass);
  out->mutable_predicted_error_of_kv_head()->Add(stats.kv_head_errors.begin(),
                                                 stats.kv_head_errors.end());
  v1::StageTimes* const stages = out->mutable_stages();
  stages->set_score_us(Micros(stats.stages.score));
  stages->set_select_us(Micros(stats.stages.select));
  stages->set_fetch_us(Micros(stats.stages.fetch));
  stages->set_attend_us(Micros(stats.stages.attend));
  stages->set_merge_us(Micros(stats.stages.merge));
}

}  // namespace

OptionalTime DeadlineAt(steady_clock::time_point arrival, uint64_t deadline_us) {
  constexpr uint64_t kForever = uint64_t{1} << 50;  // 35 years in microseconds
  if (deadline_us == 0 || deadline_us >= kForever) return std::nullopt;
  return arrival + std::chrono::microseconds(deadline_us);
}

OptionalTime Earlier(const OptionalTime& a, const OptionalTime& b) {
  if (!a.has_value() || !b.has_value()) return a.has_value() ? a : b;
  return std::min(*a, *b);
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
  const bool in_memory = request.has_memory();
  ATTND_ASSIGN_OR_RETURN(const Tensor3 k, ConvertTensor(in_memory, request.k(), "k"));
  engine::AppendChunk chunk;
  if (request.has_v()) {  // none if the model is latent
    ATTND_ASSIGN_OR_RETURN(const Tensor3 v, ConvertTensor(in_memory, request.v(), "v"));
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
  chunk.prompt_tokens = request.prompt_tokens();
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
  ATTND_ASSIGN_OR_RETURN(const Tensor3 q,
                         ConvertTensor(request.begin_pass().has_memory(), request.q(), "q"));
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
  step->deadline_us = request.deadline_us();
  step->args.deadline = DeadlineAt(arrival, step->deadline_us);
  return absl::OkStatus();
}

absl::Status LaterFromProto(const v1::DecodeRequest& request, steady_clock::time_point arrival,
                            DecodeStep* step) {
  if (request.has_begin_pass() || request.deadline_us() != 0 ||
      request.output_dtype() != v1::DTYPE_UNSPECIFIED) {
    return Invalid(request.has_begin_pass()     ? "begin_pass"
                   : request.deadline_us() != 0 ? "deadline_us"
                                                : "output_dtype",
                   " is there in a message without rows: the first message of a pass declares it");
  }
  engine::DecodeArgs& args = step->args;
  args.layer = request.layer();
  ATTND_RETURN_IF_ERROR(ConvertLater(request.q(), "q", &args.q, &args.q_heads, &args.q_head_dim));
  const bool appends = args.k.elements > 0;
  if (request.has_k() != appends) {
    return Invalid("k", appends ? " is absent" : " is present",
                   "; the pass's first message has it the other way");
  }
  if (appends) {
    ATTND_RETURN_IF_ERROR(ConvertLater(request.k(), "k", &args.k, &args.k_heads, &args.k_head_dim));
  }
  if (request.has_v() != (args.v.elements > 0)) {
    return Invalid("v", request.has_v() ? " is present" : " is absent",
                   "; the pass's first message has it the other way");
  }
  if (request.has_v()) {
    ATTND_RETURN_IF_ERROR(
        ConvertLater(request.v(), "v", &args.v, &args.v_heads, &args.v_value_dim));
  }
  args.deadline = DeadlineAt(arrival, step->deadline_us);
  return absl::OkStatus();
}

absl::StatusOr<PassOptions> PassFromProto(const v1::DecodeRequest& request,
                                          steady_clock::time_point arrival) {
  const v1::Pass& proto = request.begin_pass();
  PassOptions pass;
  pass.layers = proto.layers();
  if (pass.layers == 0 || pass.layers > kLayersMax) {
    return Invalid("begin_pass.layers", " is ", pass.layers, "; allowed are 1..", kLayersMax);
  }
  if (request.layer() != 0) {
    return Invalid("layer", " is ", request.layer(), "; a pass begins with layer 0");
  }
  if (!v1::Pass::Stats_IsValid(proto.stats())) {
    return Invalid("begin_pass.stats", " is ", static_cast<int>(proto.stats()),
                   ", which is unknown");
  }
  pass.deadline = DeadlineAt(arrival, proto.deadline_us());
  pass.want_lse = proto.want_lse();
  pass.stats = proto.stats();
  return pass;
}

void ToProto(const engine::DecodeResult& result, ReplyRows rows, v1::DecodeResponse* reply) {
  reply->mutable_rows()->Clear();
  if (rows == ReplyRows::kIfFaulty) {
    const bool faulty = std::any_of(result.rows.begin(), result.rows.end(),
                                    [](const auto& row) { return !row.status.ok(); });
    if (!faulty) return;
    for (const engine::DecodeRowResult& row : result.rows) {
      ToProto(row.status, reply->add_rows()->mutable_status());
    }
    return;
  }
  for (const engine::DecodeRowResult& row : result.rows) {
    v1::RowResult* const out = reply->add_rows();
    ToProto(row.status, out->mutable_status());
    if (row.status.ok()) StatsToProto(row.stats, out->mutable_stats());
  }
}

void ToProto(const engine::PrefillResult& result, v1::AppendKvResponse* reply) {
  reply->set_committed_tokens(result.committed_tokens);
  reply->set_segmented_tokens(result.segmented_tokens);
  reply->set_index_build_us(static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(result.build_time).count()));
}

}  // namespace attnd::server
