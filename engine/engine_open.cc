// SPDX-License-Identifier: Apache-2.0
//
// EngineImpl: new sequences: what they are made with, and prefixes that are known already.
#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/engine_impl.h"
#include "engine/lease.h"

namespace attnd::engine {
namespace {

// Gives the sizes that are asked for to the tree among the indexes.
absl::Status SetTreeSizes(OpenArgs* args) {
  if (!args->tree.has_value()) return absl::OkStatus();
  const attention::IndexSet indexes = args->indexes.value_or(args->policy->Indexes());
  if (!indexes.Has(attention::IndexKind::kTree)) {
    return absl::InvalidArgumentError(
        absl::StrCat("tree is given, and indexes are ", indexes.ToString(),
                     ": allowed is tree among them, or no indexes and a policy that needs tree"));
  }
  args->indexes = indexes;
  args->indexes->set_tree_sizes(*args->tree);
  args->tree.reset();
  return absl::OkStatus();
}

absl::Status CheckLease(std::chrono::seconds lease) {
  if (lease >= std::chrono::seconds(0) && lease <= kLeaseMax) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("lease_seconds is ", lease.count(), "; allowed are 0..", kLeaseMax.count()));
}

}  // namespace

attention::IndexSet EngineImpl::IndexesOn(const attention::Backend& backend,
                                          const attention::Policy& policy) {
  const attention::IndexSet needed = policy.Indexes();
  return needed.clustered() && !backend.Supports(needed).ok() ? kClusters : needed;
}

attention::IndexSet EngineImpl::IndexesOf(const attention::Policy& policy) const {
  return IndexesOn(backend_->OwnerOf({.policy = policy}), policy);
}

attention::IndexSet EngineImpl::IndexesFor(const OpenArgs& args) const {
  const attention::IndexSet asked = IndexesOn(*args.backend, *args.policy);
  if (args.cluster_order && !asked.clustered()) return kClusters;
  return asked.empty() && args.policy->CheckIndexes(kClusters).ok() ? kClusters : asked;
}

absl::Status EngineImpl::SetFeatureMaps(OpenArgs* args) const {
  attention::ModelParts& parts = args->model_parts;
  parts.feature_maps = nullptr;
  parts.feature_maps_id.clear();
  if (!args->indexes.has_value() || !args->indexes->Needs(attention::ModelPart::kFeatureMaps)) {
    return absl::OkStatus();
  }
  ATTND_ASSIGN_OR_RETURN(parts.feature_maps, feature_maps_.Of(args->fingerprint));
  parts.feature_maps_id = parts.feature_maps->identity();
  return parts.feature_maps->CheckShape(args->shape);
}

absl::Status EngineImpl::SetLabelChannels(OpenArgs* args) const {
  attention::ModelParts& parts = args->model_parts;
  parts.label_channels = nullptr;
  parts.label_channels_id.clear();
  if (!args->indexes.has_value() || !args->indexes->Needs(attention::ModelPart::kLabelChannels)) {
    return absl::OkStatus();
  }
  const auto model = label_channels_.Of(args->fingerprint);
  if (model == nullptr) return absl::OkStatus();
  parts.label_channels = model->choice;
  parts.label_channels_id = model->identity;
  return model->CheckShape(args->shape);
}

absl::StatusOr<std::shared_ptr<Sequence>> EngineImpl::Make(absl::string_view tenant,
                                                           OpenArgs args) {
  ATTND_ASSIGN_OR_RETURN(const uint64_t id, sequences_.NewId());
  return Sequence::Create(id, tenant, std::move(args), options_.max_sequence_tokens, &budget_);
}

absl::StatusOr<std::shared_ptr<Sequence>> EngineImpl::MakeNew(absl::string_view tenant,
                                                              const OpenArgs& args) {
  ATTND_RETURN_IF_ERROR(args.shape.Validate());
  if (args.shard.count == 0 || args.shard.count > kShardsMax ||
      args.shard.index >= args.shard.count) {
    return absl::InvalidArgumentError(absl::StrCat(
        "model.shard is ", args.shard.index, " of ", args.shard.count, "; allowed are up to ",
        kShardsMax, " shards and an index below their number"));
  }
  ATTND_RETURN_IF_ERROR(CheckLease(args.lease));
  OpenArgs complete = args;
  if (!complete.policy.has_value()) complete.policy = options_.default_policy;
  ATTND_RETURN_IF_ERROR(SetTreeSizes(&complete));
  const attention::Backend& owner =
      backend_->OwnerOf({.policy = *complete.policy,
                         .shape = &complete.shape,
                         .indexes = complete.indexes.has_value() ? &*complete.indexes : nullptr});
  complete.backend = &owner;
  ATTND_RETURN_IF_ERROR(owner.Supports(complete.shape));
  ATTND_RETURN_IF_ERROR(owner.Supports(*complete.policy));
  if (!complete.indexes.has_value()) {
    complete.indexes = IndexesFor(complete);
  }
  ATTND_RETURN_IF_ERROR(complete.indexes->Validate());
  ATTND_RETURN_IF_ERROR(owner.Supports(*complete.indexes));
  ATTND_RETURN_IF_ERROR(complete.policy->CheckIndexes(*complete.indexes));
  ATTND_RETURN_IF_ERROR(attention::CheckAnswers(owner, *complete.policy, *complete.indexes));
  ATTND_RETURN_IF_ERROR(complete.policy->CheckShape(complete.shape));
  ATTND_RETURN_IF_ERROR(SetFeatureMaps(&complete));
  ATTND_RETURN_IF_ERROR(SetLabelChannels(&complete));
  return Make(tenant, std::move(complete));
}

absl::Status EngineImpl::BeginWithKnown(std::span<const uint32_t> token_ids,
                                        const std::atomic<bool>* cancelled, Sequence* fresh) {
  const uint64_t window = std::min<uint64_t>(fresh->policy().window, token_ids.size());
  const auto reusable = token_ids.first(token_ids.size() - window);
  RestoredSegments longest;
  const storage::Proceed proceed = UnlessCancelled(cancelled);
  for (const auto& [other, lease_left] :
       sequences_.List(fresh->tenant(), 0, options_.max_sequences)) {
    ATTND_RETURN_IF_ERROR(proceed());
    RestoredSegments prefix = other->PrefixFor(*fresh, reusable, longest);
    if (prefix.tokens() > 0) longest = std::move(prefix);
  }
  const auto shared = reusable.first(longest.tokens());
  longest.token_ids = {{0, {shared.begin(), shared.end()}}};
  if (archive_ != nullptr) {
    auto stored = archive_->FindPrefix(reusable, *fresh, longest.tokens(), proceed);
    // What is in memory needs no disk.
    if (longest.tokens() == 0) ATTND_RETURN_IF_ERROR(stored.status());
    if (stored.ok() && stored->tokens() > 0) longest = *std::move(stored);
  }
  const uint64_t tokens = longest.tokens();
  if (tokens == 0) return absl::OkStatus();
  ATTND_RETURN_IF_ERROR(fresh->Restore(std::move(longest)));
  reused_tokens_.fetch_add(tokens, std::memory_order_relaxed);
  return absl::OkStatus();
}

absl::StatusOr<OpenResult> EngineImpl::PublishWith(std::shared_ptr<Sequence> sequence) {
  const OpenResult result = {sequence->id(), sequence->Info().committed_tokens,
                             sequence->args().backend->name()};
  ATTND_RETURN_IF_ERROR(sequences_.Publish(std::move(sequence)));
  return result;
}

absl::StatusOr<uint64_t> EngineImpl::Open(absl::string_view tenant, const OpenArgs& args) {
  ATTND_ASSIGN_OR_RETURN(const OpenResult opened, OpenReusing(tenant, args, {}, nullptr));
  return opened.sequence_id;
}

absl::StatusOr<OpenResult> EngineImpl::OpenReusing(absl::string_view tenant, const OpenArgs& args,
                                                   std::span<const uint32_t> token_ids,
                                                   const std::atomic<bool>* cancelled) {
  const auto open = [&]() -> absl::StatusOr<OpenResult> {
    ATTND_ASSIGN_OR_RETURN(auto sequence, MakeNew(tenant, args));
    if (!token_ids.empty()) {
      ATTND_RETURN_IF_ERROR(BeginWithKnown(token_ids, cancelled, sequence.get()));
    }
    return PublishWith(std::move(sequence));
  };
  return WithinMemory([&]() -> absl::StatusOr<OpenResult> {
    // A sequence that begins with nothing needs no room.
    return token_ids.empty() ? open() : WithRoom(cancelled, open);
  });
}

}  // namespace attnd::engine
