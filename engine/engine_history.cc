// SPDX-License-Identifier: Apache-2.0
//
// EngineImpl: shorter histories and copies: truncating, forking.
#include <memory>
#include <optional>
#include <utility>

#include "engine/engine_impl.h"

namespace attnd::engine {

absl::StatusOr<uint64_t> EngineImpl::Truncate(absl::string_view tenant, uint64_t sequence_id,
                                              uint64_t length) {
  return WithinMemory([&]() -> absl::StatusOr<uint64_t> {
    ATTND_ASSIGN_OR_RETURN(auto sequence, sequences_.Find(tenant, sequence_id));
    return WithWhole(
        sequence.get(), nullptr, [&] { return sequence->PagedForLength(length); },
        [&] { return sequence->Truncate(length); });
  });
}

absl::StatusOr<SequenceInfo> EngineImpl::Fork(absl::string_view tenant, uint64_t sequence_id,
                                              std::optional<uint64_t> length) {
  return WithinMemory([&]() -> absl::StatusOr<SequenceInfo> {
    ATTND_ASSIGN_OR_RETURN(auto parent, sequences_.Find(tenant, sequence_id));
    ATTND_ASSIGN_OR_RETURN(auto child, Make(tenant, parent->Info().args));
    ATTND_RETURN_IF_ERROR(WithWhole(
        parent.get(), nullptr,
        [&] { return parent->PagedForLength(length.value_or(parent->Info().committed_tokens)); },
        [&] { return WithoutCopies([&] { return parent->ForkInto(length, child.get()); }); }));
    absl::StatusOr<SequenceInfo> info = child->Info();  // nothing may fail once others know it
    ATTND_RETURN_IF_ERROR(sequences_.Publish(std::move(child)));
    return info;
  });
}

}  // namespace attnd::engine
