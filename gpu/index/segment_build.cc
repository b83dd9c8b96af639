// SPDX-License-Identifier: Apache-2.0
#include "gpu/index/segment_build.h"

#include <algorithm>
#include <cstring>

#include "absl/cleanup/cleanup.h"
#include "common/status.h"
#include "gpu/layout/index_offsets.h"

namespace attnd::gpu {
namespace {

using attention::IndexLayout;
using attention::kTailBlockTokens;
using attention::Segment;
using attention::SegmentPart;
using attention::SequenceView;

// Layers of a batch: enough to fill a device, few enough that a batch takes some milliseconds.
constexpr uint64_t kLayersMax = 8;

}  // namespace

SegmentBuild::SegmentBuild(attention::SegmentBuilder* builder, SegmentPart part,
                           DeviceCopyStore* store, StreamContext* context,
                           attention::WorkerPool* workers)
    : builder_(builder),
      part_(part),
      store_(store),
      context_(context),
      workers_(workers),
      shape_(builder->view().shape),
      first_row_(static_cast<uint32_t>(builder->view().tail_begin % kTailBlockTokens)),
      block_count_((first_row_ + uint64_t{builder->segment().tokens()} - 1) / kTailBlockTokens + 1),
      uploader_(store, context, &uploads_) {}

absl::Status SegmentBuild::OfDevice(absl::Status status) {
  device_failed_ |= !status.ok() && !absl::IsResourceExhausted(status);
  return status;
}

uint64_t SegmentBuild::IndexLayerBytes() const {
  return uint64_t{shape_.kv_heads} * builder_->segment().layout().head_bytes;
}
uint64_t SegmentBuild::PagesLayerBytes() const {
  return uint64_t{shape_.kv_heads} * builder_->segment().pages_head_bytes();
}
uint64_t SegmentBuild::BlockLayerBytes() const {
  return builder_->view().tail[0]->size() / shape_.layers;
}
uint64_t SegmentBuild::JobBytes() const {
  return sizeof(IndexJob) + block_count_ * sizeof(const std::byte*);
}

std::byte* SegmentBuild::IndexAt(uint32_t layer) const {
  return stays() ? segment_->index() + layer * IndexLayerBytes()
                 : work_.index.data() + (layer - first_layer_) * IndexLayerBytes();
}
std::byte* SegmentBuild::PagesAt(uint32_t layer) const {
  return stays() ? segment_->pages() + layer * PagesLayerBytes()
                 : work_.pages.data() + (layer - first_layer_) * PagesLayerBytes();
}
std::byte* SegmentBuild::BlockAt(uint64_t b, uint32_t layer) const {
  if (blocks_stay()) return blocks_[b]->pages() + layer * BlockLayerBytes();
  const uint64_t pages = stays() ? 0 : layers_at_once_ * PagesLayerBytes();
  return work_.pages.data() + pages +
         ((layer - first_layer_) * block_count_ + b) * BlockLayerBytes();
}

absl::Status SegmentBuild::Run(absl::FunctionRef<absl::Status()> proceed) {
  context_->UseStream(part_.awaited ? StreamUse::kAwaitedBuilds : StreamUse::kBackground);
  ATTND_RETURN_IF_ERROR(TakeMemory());
  // Whatever ends it: the memory of layers that the device still builds is not given back.
  const absl::Cleanup idle = [this] { OfDevice(context_->Flush()).IgnoreError(); };
  uint32_t fetched = part_.first_layer, taken = part_.first_layer;
  while (fetched < part_.end_layer) {
    ATTND_RETURN_IF_ERROR(proceed());
    const uint32_t count = std::min(layers_at_once_, part_.end_layer - fetched);
    first_layer_ = fetched;
    ATTND_RETURN_IF_ERROR(OfDevice(UploadLayers(fetched, count)));
    ATTND_RETURN_IF_ERROR(OfDevice(StartLayers(fetched, count)));
    // Beside the device, which builds these layers.
    const absl::Status before = TakeLayers(taken, fetched - taken);
    taken = fetched;
    ATTND_RETURN_IF_ERROR(OfDevice(FetchLayers(fetched, count)));
    ATTND_RETURN_IF_ERROR(before);
    fetched += count;
  }
  ATTND_RETURN_IF_ERROR(TakeLayers(taken, fetched - taken));
  if (!stays()) return absl::OkStatus();
  // Only now: a segment that is given up will be built by others, with other clusters.
  for (uint32_t layer = part_.first_layer; layer < part_.end_layer; ++layer) {
    segment_->RaiseTokens(layer, builder_->segment().tokens());
  }
  return absl::OkStatus();
}

absl::Status SegmentBuild::TakeMemory() {
  layers_at_once_ = LayersAtOnce();
  if (layers_at_once_ == 0) {
    return absl::ResourceExhaustedError(
        "building a segment needs more scratch memory than a stream of the device has");
  }
  // Batches of equal size.
  const uint32_t batches = (part_.layers() + layers_at_once_ - 1) / layers_at_once_;
  layers_at_once_ = (part_.layers() + batches - 1) / batches;
  const uint32_t wanted = layers_at_once_;
  absl::Status pinned = PinAll();
  if (!absl::IsResourceExhausted(pinned)) return pinned;
  uploader_.Release();
  segment_ = nullptr;
  layers_at_once_ = wanted;
  return BorrowForLayers();
}

absl::Status SegmentBuild::BorrowForLayers() {
  const uint64_t index_bytes = stays() ? 0 : IndexLayerBytes();
  const uint64_t pages_bytes = (stays() ? 0 : PagesLayerBytes()) + block_count_ * BlockLayerBytes();
  while (true) {
    auto work = store_->Borrow(layers_at_once_ * index_bytes, layers_at_once_ * pages_bytes);
    if (work.ok()) {
      work_ = *std::move(work);
      return absl::OkStatus();
    }
    if (layers_at_once_ == 1) return work.status();
    layers_at_once_ /= 2;
  }
}

absl::Status SegmentBuild::PinAll() {
  std::vector<std::shared_ptr<DeviceCopyStore::Copy>> copies = {store_->Find(builder_->segment())};
  for (uint64_t b = 0; whole() && b < block_count_; ++b) {
    copies.push_back(store_->Find(*builder_->view().tail[b], shape_.layers));
  }
  std::vector<Resident*> residents;
  ATTND_RETURN_IF_ERROR(uploader_.Pin(copies, PagesIn::kDeviceMemory, &residents));
  segment_ = residents.front();
  if (!whole()) return BorrowForLayers();
  blocks_.assign(residents.begin() + 1, residents.end());
  return absl::OkStatus();
}

uint32_t SegmentBuild::LayersAtOnce() const {
  const WaveRoom& room = context_->room();
  const Segment& segment = builder_->segment();
  const uint64_t scratch_bytes = IndexScratchBytes(
      KernelShapeOf(shape_), shape_.kv_heads,
      {segment.tokens(), segment.layout().clusters.room, segment.layout().groups.room});
  if (HeadsFetchedAtOnce() == 0) return 0;
  return static_cast<uint32_t>(
      std::min({kLayersMax, uint64_t{part_.layers()}, room.scratch_bytes / scratch_bytes,
                room.input_bytes / JobBytes()}));
}
uint64_t SegmentBuild::HeadsFetchedAtOnce() const {
  return context_->room().result_bytes / builder_->segment().layout().head_bytes;
}

absl::Status SegmentBuild::UploadLayers(uint32_t first, uint32_t count) {
  const SequenceView& view = builder_->view();
  const uint64_t end = first_row_ + uint64_t{builder_->segment().tokens()};
  for (uint32_t layer = first; layer < first + count; ++layer) {
    for (uint64_t b = 0; b < block_count_; ++b) {
      const auto tokens =
          static_cast<uint32_t>(std::min<uint64_t>(kTailBlockTokens, end - b * kTailBlockTokens));
      ATTND_RETURN_IF_ERROR(
          blocks_stay()
              ? uploader_.UploadTokens(blocks_[b], *view.tail[b], shape_, layer, tokens,
                                       /*later=*/nullptr)
              : uploader_.SendTokens(BlockAt(b, layer), *view.tail[b], shape_, layer, tokens));
    }
  }
  const auto for_each = [&](size_t items, absl::FunctionRef<void(size_t)> item) {
    workers_->ForEach(items, item);
  };
  ATTND_RETURN_IF_ERROR(context_->SendAll(uploads_, for_each));
  uploads_.clear();
  ATTND_RETURN_IF_ERROR(context_->Flush());  // the input buffer is wanted for the jobs
  uploader_.SetArrived();
  return absl::OkStatus();
}

// The jobs, then their lists of tail blocks. Returns the bytes to copy.
uint64_t SegmentBuild::WriteJobs(uint32_t first, uint32_t count) {
  const Segment& segment = builder_->segment();
  const IndexLayout& layout = segment.layout();
  auto* jobs = reinterpret_cast<IndexJob*>(context_->input());
  const uint64_t lists = count * sizeof(IndexJob);
  const uint64_t list_bytes = block_count_ * sizeof(const std::byte*);
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t layer = first + i;
    const uint64_t list = lists + i * list_bytes;
    auto* pages = reinterpret_cast<const std::byte**>(context_->input() + list);
    for (uint64_t b = 0; b < block_count_; ++b) *pages++ = BlockAt(b, layer);
    IndexJob& job = jobs[i] = IndexJob{};
    job.tail_blocks = reinterpret_cast<const std::byte* const*>(context_->device_input() + list);
    job.tail_block_head_bytes = BlockLayerBytes() / shape_.kv_heads;
    job.first_row = first_row_;
    job.tokens = segment.tokens();
    job.unclustered = segment.unclustered();
    job.max_clusters = layout.clusters.room;
    job.max_groups = layout.groups.room;
    job.kv_heads = shape_.kv_heads;
    job.index = IndexAt(layer);
    job.pages = PagesAt(layer);
    job.index_head_bytes = layout.head_bytes;
    job.pages_head_bytes = segment.pages_head_bytes();
    job.offsets = OffsetsOf(layout);
    if (job.max_groups > 0) job.tree = TreeOffsetsOf(layout);
  }
  first_job_ = jobs[0];
  return count * JobBytes();
}

absl::Status SegmentBuild::StartLayers(uint32_t first, uint32_t count) {
  ATTND_RETURN_IF_ERROR(context_->SendInput(WriteJobs(first, count)));
  const auto* device_jobs = reinterpret_cast<const IndexJob*>(context_->device_input());
  return context_->stream().BuildIndexes(KernelShapeOf(shape_), first_job_, device_jobs, count,
                                         context_->device_scratch());
}

// When they are built. In pieces of as many heads as the result buffer holds: a layer's index may
// be larger than that.
absl::Status SegmentBuild::FetchLayers(uint32_t first, uint32_t count) {
  const uint64_t head_bytes = builder_->segment().layout().head_bytes;
  const uint64_t heads = uint64_t{count} * shape_.kv_heads;
  const std::byte* from = IndexAt(first);
  std::byte* to = builder_->index_head(first, 0);
  for (uint64_t head = 0; head < heads; head += HeadsFetchedAtOnce()) {
    const uint64_t fetched = std::min(HeadsFetchedAtOnce(), heads - head);
    ATTND_RETURN_IF_ERROR(context_->Fetch(from + head * head_bytes, fetched * head_bytes));
    ATTND_RETURN_IF_ERROR(context_->Synchronize());
    workers_->ForEach(fetched, [&](size_t i) {
      std::memcpy(to + (head + i) * head_bytes, context_->results() + i * head_bytes, head_bytes);
    });
  }
  return absl::OkStatus();
}

absl::Status SegmentBuild::TakeLayers(uint32_t first, uint32_t count) {
  const uint32_t kv_heads = shape_.kv_heads;
  std::vector<absl::Status> taken(size_t{count} * kv_heads);
  workers_->ForEach(taken.size(), [&](size_t i) {
    taken[i] = builder_->TakeHead(first + static_cast<uint32_t>(i / kv_heads),
                                  static_cast<uint32_t>(i % kv_heads));
  });
  for (const absl::Status& status : taken) ATTND_RETURN_IF_ERROR(status);
  return absl::OkStatus();
}

}  // namespace attnd::gpu
