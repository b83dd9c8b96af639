// SPDX-License-Identifier: Apache-2.0
#include "server/calls/unary_handlers.h"

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "attention/backend.h"
#include "common/status.h"
#include "server/calls/conversions.h"
#include "server/calls/sequence_conversions.h"

namespace attnd::server {
namespace {

constexpr uint32_t kListPageMax = 1000;
// A page ends before it, after one sequence at the least. Below the 4 MiB that a gRPC client takes
// unless it is told otherwise.
constexpr uint64_t kListPageBytesMax = uint64_t{1} << 20;

void FillLimits(const UnaryContext& context, v1::Limits* limits) {
  const engine::EngineOptions& engine = context.engine.options();
  limits->set_max_message_bytes(context.options.max_message_bytes);
  limits->set_max_rows(engine.max_rows);
  limits->set_max_query_tokens(engine.max_query_tokens);
  limits->set_max_sequences(engine.max_sequences);
  limits->set_max_sequence_tokens(engine.max_sequence_tokens);
  limits->set_memory_budget_bytes(engine.memory_budget_bytes);
  limits->set_max_streams(context.options.max_streams);
  limits->set_max_queued_steps(context.options.max_queued_steps);
}

void FillClientMemory(const ServerOptions& options, v1::ClientMemory* memory) {
  memory->set_socket(options.MemorySocketPath());
  memory->set_bytes(options.client_memory_bytes);
  memory->set_device_bytes(options.client_device_memory_bytes);
  memory->set_regions(options.max_memory_regions);
  memory->set_clients(options.max_memory_clients);
  memory->set_passes(options.max_memory_passes);
}

void RecordRefusedSequence(const UnaryContext& context, const absl::Status& status) {
  if (absl::IsUnavailable(status)) context.metrics.OnRejected(Rejection::kShutdown);
  if (!absl::IsResourceExhausted(status)) return;
  const bool full = context.engine.usage().sequences >= context.engine.options().max_sequences;
  context.metrics.OnRejected(full ? Rejection::kSequences : Rejection::kMemory);
}

// Lists a preset with what one must know to use it.
void ListPreset(const UnaryContext& context, const attention::Policy& policy,
                const std::string& name, v1::GetServerInfoResponse* reply) {
  v1::Policy* const out = reply->add_policies();
  ToProto(policy, out);
  out->set_preset(name);
  v1::PresetInfo* const preset = reply->add_presets();
  ToProto(policy, context.engine.IndexesOf(policy), preset);
  preset->mutable_policy()->set_preset(name);
  const attention::Backend& owner = context.engine.backend().OwnerOf({.policy = policy});
  preset->set_backend(std::string(owner.name()));
}

// The operator's presets, each with all parameters that it stands for.
void ListNamed(const UnaryContext& context, v1::GetServerInfoResponse* reply) {
  const PolicyCatalog& policies = context.options.policies;
  for (const auto& [name, message] : policies.named()) {
    const auto policy = policies.Parse(message);
    if (!policy.ok() || !context.engine.backend().Supports(*policy).ok()) continue;
    ListPreset(context, *policy, name, reply);
  }
}

absl::Status CheckPageSize(uint32_t page_size) {
  if (page_size <= kListPageMax) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("page_size is ", page_size, "; allowed are 0..", kListPageMax));
}

// Empty, or with what the server has already.
absl::StatusOr<engine::OpenResult> OpenAs(const UnaryContext& context, const engine::OpenArgs& args,
                                          const v1::OpenSequenceRequest& request) {
  engine::Engine& engine = context.engine;
  if (request.resume_sealed_id() != 0) {
    return engine.Resume(context.tenant, args, request.resume_sealed_id(), context.cancelled);
  }
  const std::span<const uint32_t> token_ids(request.token_ids().data(),
                                            static_cast<size_t>(request.token_ids_size()));
  return engine.OpenReusing(context.tenant, args, token_ids, context.cancelled);
}

}  // namespace

absl::string_view ServerVersion() { return ATTND_VERSION; }

absl::Status Handle(const UnaryContext& context, const v1::GetServerInfoRequest&,
                    v1::GetServerInfoResponse* reply) {
  const attention::Backend& backend = context.engine.backend();
  reply->set_version(std::string(ServerVersion()));
  for (const absl::string_view name : backend.names()) reply->add_backends(std::string(name));
  reply->set_device(std::string(backend.device()));
  reply->set_gpu_sharing(context.gpu_sharing);
  if (const auto newest = context.newest_round_trip.Get()) *reply->mutable_round_trip() = *newest;
  reply->set_backend_status(std::string(backend.Health().message()));
  reply->set_simd_target(std::string(backend.target()));
  for (const attention::Policy& policy : attention::PresetPolicies()) {
    if (!backend.Supports(policy).ok()) continue;
    ListPreset(context, policy, policy.preset, reply);
  }
  ListNamed(context, reply);
  ToProto(context.engine.options().default_policy, reply->mutable_default_policy());
  FillLimits(context, reply->mutable_limits());
  if (context.options.allow_client_memory) {
    FillClientMemory(context.options, reply->mutable_client_memory());
  }
  return absl::OkStatus();
}

absl::Status Handle(const UnaryContext& context, const v1::OpenSequenceRequest& request,
                    v1::OpenSequenceResponse* reply) {
  ATTND_ASSIGN_OR_RETURN(
      const engine::OpenArgs args,
      FromProto(request, context.options.max_sequence_tokens, context.options.policies));
  if (request.resume_sealed_id() != 0 && request.token_ids_size() > 0) {
    return absl::InvalidArgumentError("token_ids must be empty where resume_sealed_id is given");
  }
  const auto opened = OpenAs(context, args, request);
  RecordRefusedSequence(context, opened.status());
  ATTND_RETURN_IF_ERROR(opened.status());
  reply->set_sequence_id(opened->sequence_id);
  reply->set_tokens_present(opened->tokens_present);
  reply->set_backend(std::string(opened->backend));
  return absl::OkStatus();
}

absl::Status Handle(const UnaryContext& context, const v1::TruncateSequenceRequest& request,
                    v1::TruncateSequenceResponse* reply) {
  const auto segmented =
      context.engine.Truncate(context.tenant, request.sequence_id(), request.length());
  if (absl::IsResourceExhausted(segmented.status())) {
    context.metrics.OnRejected(Rejection::kMemory);
  }
  ATTND_RETURN_IF_ERROR(segmented.status());
  reply->set_segmented_tokens(*segmented);
  return absl::OkStatus();
}

absl::Status Handle(const UnaryContext& context, const v1::ForkSequenceRequest& request,
                    v1::ForkSequenceResponse* reply) {
  const auto length =
      request.has_length() ? std::optional<uint64_t>(request.length()) : std::optional<uint64_t>();
  auto info = context.engine.Fork(context.tenant, request.sequence_id(), length);
  RecordRefusedSequence(context, info.status());
  ATTND_RETURN_IF_ERROR(info.status());
  reply->set_sequence_id(info->id);
  reply->set_committed_tokens(info->committed_tokens);
  return absl::OkStatus();
}

absl::Status Handle(const UnaryContext& context, const v1::SealSequenceRequest& request,
                    v1::SealSequenceResponse* reply) {
  ATTND_ASSIGN_OR_RETURN(
      const engine::SealResult sealed,
      context.engine.Seal(context.tenant, request.sequence_id(), context.cancelled));
  reply->set_sealed_id(sealed.sealed_id);
  reply->set_tokens(sealed.tokens);
  reply->set_segments(sealed.segments);
  reply->set_written_segments(sealed.written_segments);
  reply->set_written_bytes(sealed.written_bytes);
  return absl::OkStatus();
}

absl::Status Handle(const UnaryContext& context, const v1::ListSealedRequest& request,
                    v1::ListSealedResponse* reply) {
  const uint32_t page_size = request.page_size() != 0 ? request.page_size() : kListPageMax;
  ATTND_RETURN_IF_ERROR(CheckPageSize(page_size));
  ATTND_ASSIGN_OR_RETURN(
      const auto sealed,
      context.engine.ListSealed(context.tenant, request.after_sealed_id(), page_size + 1));
  for (const engine::SealedInfo& info : sealed) {
    if (static_cast<uint32_t>(reply->sealed_size()) == page_size) {
      reply->set_next_after_sealed_id(reply->sealed().rbegin()->sealed_id());
      break;
    }
    v1::SealedSequence* const entry = reply->add_sealed();
    entry->set_sealed_id(info.id);
    entry->set_tokens(info.tokens);
    entry->set_sealed_unix_s(info.sealed_unix_s);
  }
  return absl::OkStatus();
}

absl::Status Handle(const UnaryContext& context, const v1::DropSealedRequest& request,
                    v1::DropSealedResponse*) {
  return context.engine.DropSealed(context.tenant, request.sealed_id());
}

absl::Status Handle(const UnaryContext& context, const v1::CloseSequenceRequest& request,
                    v1::CloseSequenceResponse*) {
  return context.engine.Close(context.tenant, request.sequence_id());
}

absl::Status Handle(const UnaryContext& context, const v1::RenewLeaseRequest& request,
                    v1::RenewLeaseResponse* reply) {
  ATTND_ASSIGN_OR_RETURN(const engine::Lease::Call call,
                         context.engine.BeginCall(context.tenant, request.sequence_id()));
  reply->set_lease_seconds(static_cast<uint32_t>(call.lease().count()));
  return absl::OkStatus();
}

absl::Status Handle(const UnaryContext& context, const v1::ListSequencesRequest& request,
                    v1::ListSequencesResponse* reply) {
  const uint32_t page_size = request.page_size() != 0 ? request.page_size() : kListPageMax;
  ATTND_RETURN_IF_ERROR(CheckPageSize(page_size));
  const uint64_t page_bytes = std::min(kListPageBytesMax, context.options.max_message_bytes / 2);
  uint64_t bytes = 0, last_id = 0;
  // One more than the page, to know whether there is a next one.
  const auto sequences =
      context.engine.List(context.tenant, request.after_sequence_id(), page_size + 1);
  for (const engine::SequenceInfo& info : sequences) {
    v1::SequenceInfo entry;
    ToProto(info, &entry);
    bytes += entry.ByteSizeLong();
    const bool full = static_cast<uint32_t>(reply->sequences_size()) == page_size ||
                      (last_id != 0 && bytes > page_bytes);
    if (full) {
      reply->set_next_after_sequence_id(last_id);
      break;
    }
    last_id = info.id;
    reply->mutable_sequences()->Add(std::move(entry));
  }
  return absl::OkStatus();
}

}  // namespace attnd::server
