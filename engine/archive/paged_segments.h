// SPDX-License-Identifier: Apache-2.0
//
// PagedSegments: the payloads of paged segments (docs/DESIGN.md, "Paged segments"). Their pages lie
// in segment files, and in memory as far as there is room. Implements attention's PageStore with
// storage's PageCache.
#ifndef ATTND_ENGINE_ARCHIVE_PAGED_SEGMENTS_H_
#define ATTND_ENGINE_ARCHIVE_PAGED_SEGMENTS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attention/segment/paged_payload.h"
#include "attention/segment/segment.h"
#include "common/mutex.h"
#include "engine/archive/stored_file.h"
#include "storage/cache/page_cache.h"

namespace attnd::engine {

// One file's pages as a segment's payload. Remembers which pages of each layer the newest steps
// wanted, as the next step will want nearly the same pages (docs/research/PAGE_POOL.md; papers:
// AsyncTLS, section 4.2). Thread-safe.
class FilePayload : public attention::PagedPayload {
 public:
  // Converts an error into the one that clients are told.
  using ForClients = std::function<absl::Status(const absl::Status&)>;

  FilePayload(attention::PageStore* store, std::shared_ptr<storage::PageCache::Source> source,
              StoredFile::Use use, const ForClients* for_clients)
      : store_(store),
        source_(std::move(source)),
        use_(std::move(use)),
        for_clients_(for_clients),
        wanted_(source_->file().header().layers) {}

  attention::PageStore* store() const override { return store_; }
  // In the form for clients, as rows are refused with this status.
  absl::Status status() const override;

  const std::shared_ptr<storage::PageCache::Source>& source() const { return source_; }
  const std::shared_ptr<StoredFile>& file() const { return use_.file(); }

  // Notes the pages that a step wants of a layer, ascending.
  void Remember(uint32_t layer, std::span<const storage::PageCache::PageId> pages) const;
  // Begins to read the pages of the layer that were remembered last.
  void Prefetch(uint32_t layer) const;

 private:
  // Constant.
  attention::PageStore* const store_;
  const std::shared_ptr<storage::PageCache::Source> source_;
  const StoredFile::Use use_;
  const ForClients* const for_clients_;

  mutable Mutex mutex_;
  // [layers] the pages that the newest steps wanted.
  mutable std::vector<std::vector<storage::PageCache::PageId>> wanted_ ABSL_GUARDED_BY(mutex_);
  mutable absl::Status lost_ ABSL_GUARDED_BY(mutex_);  // the first DataLoss; it stays
};

// The payload of a paged segment of this engine.
inline const FilePayload& FilePayloadOf(const attention::Segment& segment) {
  return static_cast<const FilePayload&>(*segment.paged_payload());
}

// Thread-safe. Must outlive the steps that use it; segments may outlive it.
class PagedSegments : public attention::PageStore {
 public:
  // remembers: whether FilePayload::Prefetch will be called.
  PagedSegments(std::shared_ptr<storage::PageCache> cache, bool remembers,
                FilePayload::ForClients for_clients)
      : cache_(std::move(cache)), remembers_(remembers), for_clients_(std::move(for_clients)) {}
  // Ends all reading.
  ~PagedSegments() override { cache_->Stop(); }

  // InvalidArgument if a page of the file is too large for the cache.
  absl::StatusOr<std::shared_ptr<const FilePayload>> Add(
      std::unique_ptr<const storage::SegmentFile> file, StoredFile::Use use);
  // Bytes of memory that a payload takes beside its pages: tables of pages and of checksums.
  static uint64_t BooksBytes(const storage::SegmentFileHeader& header);

  uint64_t fetch_bytes_max() const override { return cache_->lease_bytes_max(); }
  absl::StatusOr<std::unique_ptr<attention::PagePins>> Fetch(
      std::span<attention::PageWant> wants, const attention::PagePatience& patience) override;

  // Gives back memory of pages; returns how many bytes.
  uint64_t Shrink(uint64_t bytes) { return cache_->Shrink(bytes); }
  uint64_t reclaimable_bytes() const { return cache_->reclaimable_bytes(); }
  storage::PageCacheStats stats() const { return cache_->stats(); }

 private:
  const std::shared_ptr<storage::PageCache> cache_;
  const bool remembers_;
  const FilePayload::ForClients for_clients_;
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_ARCHIVE_PAGED_SEGMENTS_H_
