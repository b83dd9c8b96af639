// SPDX-License-Identifier: Apache-2.0
//
// EngineImpl: its life, from Create to Shutdown, and what it says of its sequences.
#include "engine/engine.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "common/status.h"
#include "engine/engine_impl.h"

namespace attnd::engine {

EngineImpl::EngineImpl(const EngineOptions& options, std::unique_ptr<attention::Backend> backend,
                       EventListener* listener)
    : options_(options),
      backend_(std::move(backend)),
      listener_(listener),
      append_workers_(std::clamp(options.index_threads / 4, 1U, kAppendThreadsMax)),
      budget_(options.memory_budget_bytes),
      sequences_(options.max_sequences, options.lease_clock),
      lease_watch_(&sequences_, listener),
      segmenter_(
          {options.segment_tokens, options.index_threads, [this] { return !InUse(kNoCopies); }},
          backend_.get(), &budget_, &gate_, listener) {}

EngineImpl::~EngineImpl() {
  EngineImpl::Shutdown();
  budget_.SetReclaim(nullptr);
}

absl::Status EngineImpl::Start() {
  ATTND_ASSIGN_OR_RETURN(feature_maps_, FeatureMapStore::Load(options_.feature_maps));
  ATTND_ASSIGN_OR_RETURN(label_channels_, LabelChannelStore::Load(options_.label_channels));
  if (!options_.archive.data_dir.empty()) {
    ArchiveOptions options = options_.archive;
    if (listener_ != nullptr) {
      options.on_pages_read = [listener = listener_](uint64_t bytes, auto time) {
        listener->OnPagesRead(bytes, time);
      };
      options.on_disk_fault = [listener = listener_](const absl::Status& status) {
        listener->OnDiskFault(status);
      };
    }
    ATTND_ASSIGN_OR_RETURN(archive_, Archive::Open(options, &budget_, nullptr));
    budget_.SetReclaim([this](uint64_t bytes) { return archive_->Reclaim(bytes); });
    Pager::Hooks hooks = {.sequences = [this] { return sequences_.All(); },
                          .drop_copies = [this] { return DropCopies(); }};
    pager_ = std::make_unique<Pager>(archive_.get(), &budget_, std::move(hooks), options);
    ATTND_RETURN_IF_ERROR(pager_->Start());
  }
  if (listener_ != nullptr && options_.audit.share > 0) {
    auditor_ = std::make_unique<Auditor>(options_.audit, &budget_, &gate_, listener_);
    ATTND_RETURN_IF_ERROR(auditor_->Start());
  }
  ATTND_RETURN_IF_ERROR(lease_watch_.Start());
  return segmenter_.Start();
}

absl::StatusOr<SequenceInfo> EngineImpl::Info(absl::string_view tenant, uint64_t sequence_id) {
  ATTND_ASSIGN_OR_RETURN(auto sequence, sequences_.Find(tenant, sequence_id));
  return sequence->Info();
}

absl::StatusOr<Lease::Call> EngineImpl::BeginCall(absl::string_view tenant, uint64_t sequence_id) {
  ATTND_ASSIGN_OR_RETURN(CalledSequence called, sequences_.Find(tenant, sequence_id));
  return std::move(called.call);
}

absl::Status EngineImpl::Close(absl::string_view tenant, uint64_t sequence_id) {
  ATTND_ASSIGN_OR_RETURN(const auto closed, sequences_.Remove(tenant, sequence_id));
  closed->Close();
  return absl::OkStatus();
}

std::vector<SequenceInfo> EngineImpl::List(absl::string_view tenant, uint64_t after,
                                           uint32_t count) {
  std::vector<SequenceInfo> infos;
  for (const auto& [sequence, lease_left] : sequences_.List(tenant, after, count)) {
    infos.push_back(sequence->Info());
    infos.back().lease_left = lease_left;
  }
  return infos;
}

void EngineImpl::WaitForBackground() {
  segmenter_.WaitUntilIdle();
  if (auditor_ != nullptr) auditor_->WaitUntilIdle();
}

bool EngineImpl::DropCopies() {
  // A prompt's tokens come in large pieces, which may find no room in a budget that has some left.
  if (InUse(kNoUploads) && segmenter_.DropUploads()) return true;
  if (!InUse(kNoCopies)) return false;
  // Steps use sequences while they are being ordered, so each time is read once.
  std::vector<std::pair<std::chrono::steady_clock::time_point, std::shared_ptr<Sequence>>> all;
  for (auto& sequence : sequences_.All()) all.emplace_back(sequence->last_used(), sequence);
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  return std::any_of(all.begin(), all.end(), [](const auto& s) { return s.second->DropEarly(); });
}

// Shutdown: 1. no new sequences, 2. no sequences are closed for their leases, 3. no segments are
// built, 4. no rows are audited, 5. no segments are moved to disk.
void EngineImpl::Shutdown() {
  EngineImpl::StopOpening();
  lease_watch_.Shutdown();
  segmenter_.Shutdown();
  if (auditor_ != nullptr) auditor_->Shutdown();
  if (pager_ != nullptr) pager_->Shutdown();
}

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const EngineOptions& options,
                                                       std::unique_ptr<attention::Backend> backend,
                                                       EventListener* listener) {
  ATTND_RETURN_IF_ERROR(options.Validate());
  ATTND_RETURN_IF_ERROR(backend->Supports(options.default_policy));
  return WithinMemory([&]() -> absl::StatusOr<std::unique_ptr<Engine>> {
    auto engine = std::make_unique<EngineImpl>(options, std::move(backend), listener);
    ATTND_RETURN_IF_ERROR(engine->Start());
    return std::unique_ptr<Engine>(std::move(engine));
  });
}

}  // namespace attnd::engine
