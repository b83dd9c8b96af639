// SPDX-License-Identifier: Apache-2.0
//
// EngineImpl: sequences on disk: sealing, resuming, dropping, listing.
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/engine_impl.h"

namespace attnd::engine {
namespace {

// What was sealed can only go on as it was.
absl::Status CheckResumes(const OpenArgs& wanted, const OpenArgs& sealed) {
  if (wanted.fingerprint != sealed.fingerprint || wanted.shape != sealed.shape ||
      wanted.shard != sealed.shard) {
    return absl::FailedPreconditionError(
        "model is not the one that the sealed sequence was made with");
  }
  if (wanted.indexes != sealed.indexes) {
    return absl::FailedPreconditionError(
        absl::StrCat("indexes are ", wanted.indexes->ToString(), "; the sealed sequence has ",
                     sealed.indexes->ToString(), ": leave them out, or ask for these"));
  }
  if (!wanted.model_parts.CanReadSegmentsOf(sealed.model_parts)) {
    return absl::FailedPreconditionError(
        "the sealed sequence's summaries were made with other feature maps than the server's");
  }
  const attention::Policy& policy = wanted.policy.value();
  if (policy.sink == sealed.policy->sink && policy.window <= sealed.policy->window) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat("policy has sink ", policy.sink, " and window ", policy.window,
                   "; the sealed sequence allows sink ", sealed.policy->sink, " and windows up to ",
                   sealed.policy->window));
}

}  // namespace

absl::StatusOr<Archive*> EngineImpl::GetArchive() {
  if (archive_ != nullptr) return archive_.get();
  return absl::FailedPreconditionError(
      "the server keeps no sequences on disk: it was started without a data folder");
}

absl::StatusOr<SealResult> EngineImpl::Seal(absl::string_view tenant, uint64_t sequence_id,
                                            const std::atomic<bool>* cancelled) {
  return WithinMemory([&]() -> absl::StatusOr<SealResult> {
    ATTND_ASSIGN_OR_RETURN(Archive* const archive, GetArchive());
    ATTND_ASSIGN_OR_RETURN(auto sequence, sequences_.Find(tenant, sequence_id));
    return archive->Seal(sequence.get(), UnlessCancelled(cancelled));
  });
}

absl::StatusOr<OpenResult> EngineImpl::Resume(absl::string_view tenant, const OpenArgs& args,
                                              uint64_t sealed_id,
                                              const std::atomic<bool>* cancelled) {
  if (args.tree.has_value()) {
    return absl::InvalidArgumentError(
        "tree must be absent where resume_sealed_id is given: a resumed sequence keeps its tree's "
        "sizes");
  }
  return WithinMemory([&]() -> absl::StatusOr<OpenResult> {
    ATTND_ASSIGN_OR_RETURN(Archive* const archive, GetArchive());
    ATTND_ASSIGN_OR_RETURN(const Archive::Sealed sealed, archive->OpenSealed(tenant, sealed_id));
    const OpenArgs& before = sealed.tail.metadata.args;
    OpenArgs wanted = args;
    if (!wanted.policy.has_value()) wanted.policy = before.policy;
    if (!wanted.indexes.has_value()) wanted.indexes = before.indexes;
    // Whoever names the kinds alone leaves the sizes to the sealed sequence.
    if (wanted.indexes->Has(attention::IndexKind::kTree)) {
      wanted.indexes->set_tree_sizes(before.indexes->tree_sizes());
    }
    if (wanted.cluster_order && wanted.indexes->token_order()) {
      return absl::FailedPreconditionError(
          "layout is cluster order; the sealed sequence is in token order");
    }
    ATTND_RETURN_IF_ERROR(SetFeatureMaps(&wanted));
    ATTND_RETURN_IF_ERROR(CheckResumes(wanted, before));
    return WithRoom(cancelled, [&]() -> absl::StatusOr<OpenResult> {
      ATTND_ASSIGN_OR_RETURN(auto sequence, MakeNew(tenant, wanted));
      ATTND_RETURN_IF_ERROR(archive->Resume(sealed, sequence.get(), UnlessCancelled(cancelled)));
      return PublishWith(std::move(sequence));
    });
  });
}

absl::Status EngineImpl::DropSealed(absl::string_view tenant, uint64_t sealed_id) {
  return WithinMemory([&]() -> absl::Status {
    ATTND_ASSIGN_OR_RETURN(Archive* const archive, GetArchive());
    return archive->Drop(tenant, sealed_id);
  });
}

absl::StatusOr<std::vector<SealedInfo>> EngineImpl::ListSealed(absl::string_view tenant,
                                                               uint64_t after, uint32_t count) {
  return WithinMemory([&]() -> absl::StatusOr<std::vector<SealedInfo>> {
    ATTND_ASSIGN_OR_RETURN(Archive* const archive, GetArchive());
    return archive->List(tenant, after, count);
  });
}

ArchiveStats EngineImpl::archive_stats() const {
  ArchiveStats stats = archive_ != nullptr ? archive_->stats() : ArchiveStats{};
  stats.reused_tokens = reused_tokens_.load(std::memory_order_relaxed);
  return stats;
}

bool EngineImpl::MayReadDisk(absl::string_view tenant, uint64_t sequence_id) {
  if (archive_ == nullptr) return false;
  const auto sequence = sequences_.Find(tenant, sequence_id);
  return sequence.ok() && (*sequence)->has_paged_segments();
}

}  // namespace attnd::engine
