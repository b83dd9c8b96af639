// SPDX-License-Identifier: Apache-2.0
#include "ctl/size.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "attention/index/segment_builder.h"
#include "attention/policy/policy.h"
#include "attention/segment/pages.h"
#include "attention/segment/segment.h"
#include "common/checked_math.h"
#include "common/status.h"
#include "engine/archive/paged_segments.h"
#include "engine/archive/pager.h"
#include "engine/sequence/sequence.h"
#include "engine/sequence/tail.h"
#include "engine/sequence/token_ids.h"
#include "gpu/layout/kernel_shapes.h"
#include "gpu/layout/memory_split.h"

namespace attnd::ctl {
namespace {

using attention::IndexLayout;
using attention::Segment;
using attention::SegmentForm;
using attention::TailBlock;

absl::Status WrongLoad(absl::string_view what) { return absl::InvalidArgumentError(what); }

absl::StatusOr<uint64_t> Whole(const CheckedSize& size) {
  if (size.get().has_value()) return *size.get();
  return absl::OutOfRangeError("the sizes of this load do not fit 64 bits");
}

absl::Status CheckCount(const char* option, uint64_t value, uint64_t min, uint64_t max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return WrongLoad(absl::StrCat(option, " is ", value, "; allowed are ", min, "..", max));
}

// The rest is what a server says of its options.
absl::Status CheckMemory(const Load& load) {
  if (load.memory_bytes == 0) {
    return load.page_memory_bytes == 0 ? absl::OkStatus()
                                       : WrongLoad("--page-memory is given without --memory");
  }
  engine::EngineOptions options;
  options.memory_budget_bytes = load.memory_bytes;
  options.archive.data_dir = "any";
  options.archive.page_memory_bytes = load.page_memory_bytes;
  return options.Validate();
}

absl::Status CheckGpu(const Load& load) {
  if (load.gpu_memory_bytes == 0) {
    return load.gpu_page_memory_bytes == 0
               ? absl::OkStatus()
               : WrongLoad("--gpu-page-memory is given without --gpu-memory");
  }
  ATTND_RETURN_IF_ERROR(CheckCount("--gpu-memory", load.gpu_memory_bytes,
                                   gpu::kDeviceMemoryBytesMin, uint64_t{1} << 50));
  const ModelShape& shape = load.shape;
  const bool kernels = gpu::HasKernels({shape.dtype, shape.head_dim, shape.value_dim}) &&
                       !shape.latent && shape.group() <= gpu::kKernelGroupMax;
  if (!kernels) {
    return WrongLoad(absl::StrCat("--gpu-memory is given, and the GPU has no kernels for ",
                                  DTypeName(shape.dtype), ", head_dim ", shape.head_dim,
                                  ", value_dim ", shape.value_dim,
                                  shape.latent ? " of a latent" : "", " and ", shape.group(),
                                  " query heads a KV head: the CPU answers for this model"));
  }
  const bool reads =
      load.indexes == attention::kClusterIndexes || load.indexes == attention::kTreeIndexes;
  if (reads) return absl::OkStatus();
  return WrongLoad(absl::StrCat("--gpu-memory is given, and --index is ", load.indexes.ToString(),
                                "; the GPU reads clusters or tree"));
}

absl::Status CheckLoad(const Load& load) {
  ATTND_RETURN_IF_ERROR(load.shape.Validate());
  ATTND_RETURN_IF_ERROR(load.indexes.Validate());
  ATTND_RETURN_IF_ERROR(CheckCount("--sequences", load.sequences, 1, kLoadSequencesMax));
  ATTND_RETURN_IF_ERROR(CheckCount("--context", load.context_tokens, 1, kLoadTokensMax));
  ATTND_RETURN_IF_ERROR(
      CheckCount("--generated", load.generated_tokens, 0, kLoadTokensMax - load.context_tokens));
  ATTND_RETURN_IF_ERROR(CheckMemory(load));
  return CheckGpu(load);
}

// ---- a sequence ----

// Its zones are those that every policy has by default.
engine::CutRules RulesOf(const Load& load) {
  const attention::Policy policy;
  return {load.indexes,  load.segment_tokens,        policy.sink,
          policy.window, load.gpu_memory_bytes != 0, load.token_ids};
}

uint64_t FileBooksBytes(const SegmentForm& form) {
  storage::SegmentFileHeader header;
  header.layers = form.shape.layers;
  header.kv_heads = form.shape.kv_heads;
  header.pages = static_cast<uint32_t>(attention::PageGeometry::PagesFor(form.tokens));
  return engine::PagedSegments::BooksBytes(header);
}

CheckedSize BooksBytes(const Load& load, const engine::SequenceCut& cut) {
  engine::OpenArgs args;
  args.shape = load.shape;
  args.policy = attention::Policy();
  args.indexes = load.indexes;
  const CheckedSize ids = load.token_ids ? engine::TokenIds::BytesOf(load.context_tokens) : 0;
  return ids + engine::Sequence::ObjectBytes("", args) +
         engine::Sequence::ListBytes(load.shape, cut.tail_blocks + cut.segments.size());
}

absl::StatusOr<SequenceSize> SequenceSizeOf(const Load& load) {
  SequenceSize size;
  size.cut = engine::CutOf(load.shape, RulesOf(load), load.context_tokens, load.generated_tokens);
  CheckedSize payload, index, early, file_books;
  for (const SegmentForm& form : size.cut.segments) {
    payload += Segment::PayloadBytes(form);
    index += Segment::IndexBytes(form);
    file_books += FileBooksBytes(form);
  }
  for (const SegmentForm& form : size.cut.early) {
    early += CheckedSize(Segment::PayloadBytes(form)) + Segment::IndexBytes(form);
  }
  const CheckedSize tail = CheckedSize(size.cut.tail_blocks) * TailBlock::Bytes(load.shape);
  ATTND_ASSIGN_OR_RETURN(size.payload_bytes, Whole(payload));
  ATTND_ASSIGN_OR_RETURN(size.index_bytes, Whole(index));
  ATTND_ASSIGN_OR_RETURN(size.file_books_bytes, Whole(file_books));
  ATTND_ASSIGN_OR_RETURN(size.early_bytes, Whole(early));
  ATTND_ASSIGN_OR_RETURN(size.tail_bytes, Whole(tail));
  ATTND_ASSIGN_OR_RETURN(size.books_bytes, Whole(BooksBytes(load, size.cut)));
  return size;
}

// ---- the memory budget ----

uint64_t ShareOf(double share, uint64_t bytes) {
  return static_cast<uint64_t>(share * static_cast<double>(bytes));
}

// A segment of segment_tokens, or a shorter one that is the only one, beside the tail blocks that
// it replaces, and a builder's scratch memory.
uint64_t BuildingBytes(const Load& load, const engine::SequenceCut& cut) {
  if (cut.segments.empty()) return 0;
  const SegmentForm& form = cut.segments.front();
  return Segment::IndexBytes(form) + Segment::PayloadBytes(form) +
         engine::Tail::BlocksOf(0, form.tokens) * TailBlock::Bytes(load.shape) +
         attention::HeadBuilder::ScratchBytes(form);
}

// Moves payload to disk as a pager does which must free `bytes`: of one sequence after the other, a
// segment at a time.
void MoveToDisk(const Load& load, const SequenceSize& sequence, uint64_t bytes, HostSize* host) {
  const uint64_t freed = sequence.payload_bytes - sequence.file_books_bytes;
  if (freed == 0) return;
  const uint64_t whole = std::min(load.sequences, bytes / freed);
  host->disk_bytes = whole * sequence.payload_bytes;
  host->file_books_bytes = whole * sequence.file_books_bytes;
  uint64_t left = whole == load.sequences ? 0 : bytes - whole * freed;
  for (const SegmentForm& form : sequence.cut.segments) {
    if (left == 0) break;
    const uint64_t payload = Segment::PayloadBytes(form), books = FileBooksBytes(form);
    host->disk_bytes += payload;
    host->file_books_bytes += books;
    left -= std::min(left, payload - books);
  }
  host->payload_bytes -= host->disk_bytes;
}

// Beyond the budget's mark payload lies on disk, until the target is reached.
void DivideTiers(const Load& load, const SequenceSize& sequence, uint64_t held, HostSize* host) {
  if (load.memory_bytes == 0) {
    host->early_bytes = load.sequences * sequence.early_bytes;
    return;
  }
  const uint64_t target = ShareOf(engine::Pager::kTarget, load.memory_bytes);
  if (held > ShareOf(engine::Pager::kMark, load.memory_bytes)) {
    // A GPU needs all in memory: what does not fit is missing.
    if (load.gpu_memory_bytes == 0) MoveToDisk(load, sequence, held - target, host);
  } else if (held <= target) {
    host->early_bytes = std::min(load.sequences * sequence.early_bytes, target - held);
  }
}

struct HostNeeds {
  uint64_t each = 0;   // bytes of a sequence that never leave memory
  uint64_t fixed = 0;  // whatever the number of sequences
};

// With a GPU payload never leaves memory, and the pager must not begin to move it.
HostNeeds NeedsOf(const Load& load, const SequenceSize& sequence, const HostSize& host) {
  const bool gpu = load.gpu_memory_bytes != 0;
  return {sequence.pinned_bytes() + (gpu ? sequence.payload_bytes : sequence.file_books_bytes),
          host.page_memory_bytes + host.building_bytes};
}

uint64_t NeededBytes(const Load& load, const HostSize& host, const HostNeeds& needs) {
  const uint64_t least = load.sequences * needs.each + needs.fixed;
  if (load.gpu_memory_bytes == 0) return least;
  const double held = static_cast<double>(least - host.building_bytes) / engine::Pager::kMark;
  return std::max(least, static_cast<uint64_t>(std::ceil(held)));
}

absl::StatusOr<HostSize> HostSizeOf(const Load& load, const SequenceSize& sequence) {
  HostSize host;
  const CheckedSize count = load.sequences;
  if (load.memory_bytes != 0) {
    engine::ArchiveOptions archive;
    archive.page_memory_bytes = load.page_memory_bytes;
    host.page_memory_bytes = archive.PageMemoryBytes(load.memory_bytes);
  }
  host.building_bytes = BuildingBytes(load, sequence.cut);
  // No sum of what follows is greater than twice this one, however far the doubles round.
  const CheckedSize all = (CheckedSize(sequence.pinned_bytes()) + sequence.payload_bytes +
                           sequence.early_bytes + sequence.file_books_bytes) *
                              count +
                          host.page_memory_bytes + host.building_bytes;
  ATTND_RETURN_IF_ERROR(Whole(all * 2).status());
  host.payload_bytes = load.sequences * sequence.payload_bytes;
  host.index_bytes = load.sequences * sequence.index_bytes;
  host.tail_bytes = load.sequences * sequence.tail_bytes;
  host.books_bytes = load.sequences * sequence.books_bytes;
  const uint64_t held =
      host.payload_bytes + load.sequences * sequence.pinned_bytes() + host.page_memory_bytes;
  DivideTiers(load, sequence, held, &host);
  host.needed_bytes = NeededBytes(load, host, NeedsOf(load, sequence, host));
  if (load.memory_bytes != 0 && host.needed_bytes > load.memory_bytes) {
    host.missing_bytes = host.needed_bytes - load.memory_bytes;
  }
  return host;
}

// How many sequences a budget holds, which `each` takes of it once and `fixed` in any case.
uint64_t Fitting(uint64_t budget, uint64_t each, uint64_t fixed, uint64_t sequences) {
  if (budget < fixed) return 0;
  return each == 0 ? sequences : std::min(sequences, (budget - fixed) / each);
}

uint64_t FittingInMemory(const Load& load, const SequenceSize& sequence, const HostSize& host) {
  if (load.memory_bytes == 0) return load.sequences;
  const HostNeeds needs = NeedsOf(load, sequence, host);
  const uint64_t fitting = Fitting(load.memory_bytes, needs.each, needs.fixed, load.sequences);
  if (load.gpu_memory_bytes == 0) return fitting;
  const uint64_t mark = ShareOf(engine::Pager::kMark, load.memory_bytes);
  return std::min(fitting, Fitting(mark, needs.each, host.page_memory_bytes, load.sequences));
}

// ---- a GPU ----

struct GpuNeeds {
  uint64_t pages = 0, tail = 0, index = 0;  // of a sequence
};

// Copies of segments and early segments as wholes, and of the tail blocks behind them.
absl::StatusOr<GpuNeeds> GpuNeedsOf(const Load& load, const SequenceSize& sequence) {
  CheckedSize pages, tail, index;
  for (const auto* list : {&sequence.cut.segments, &sequence.cut.early}) {
    for (const SegmentForm& form : *list) {
      pages += gpu::AlignedBytes(Segment::PayloadBytes(form));
      index += gpu::AlignedBytes(Segment::IndexBytes(form));
    }
  }
  const uint64_t blocks = engine::Tail::BlocksOf(sequence.cut.early_end, sequence.cut.length);
  tail += CheckedSize(blocks) * gpu::AlignedBytes(TailBlock::Bytes(load.shape));
  GpuNeeds needs;
  ATTND_ASSIGN_OR_RETURN(needs.pages, Whole(pages));
  ATTND_ASSIGN_OR_RETURN(needs.tail, Whole(tail));
  ATTND_ASSIGN_OR_RETURN(needs.index, Whole(index));
  return needs;
}

absl::StatusOr<GpuSize> GpuSizeOf(const Load& load, const SequenceSize& sequence,
                                  uint64_t* fitting) {
  ATTND_ASSIGN_OR_RETURN(const GpuNeeds needs, GpuNeedsOf(load, sequence));
  const gpu::StreamMemory stream = gpu::StreamMemoryOf(load.gpu_memory_bytes, gpu::kDeviceStreams);
  const gpu::CopyMemory copies = gpu::CopyMemoryOf(load.gpu_memory_bytes, gpu::kDeviceStreams,
                                                   stream, load.gpu_page_memory_bytes);
  GpuSize size;
  ATTND_ASSIGN_OR_RETURN(size.pages_bytes, Whole(CheckedSize(needs.pages) * load.sequences));
  ATTND_ASSIGN_OR_RETURN(size.tail_bytes, Whole(CheckedSize(needs.tail) * load.sequences));
  ATTND_RETURN_IF_ERROR(Whole(CheckedSize(size.pages_bytes) + size.tail_bytes).status());
  ATTND_ASSIGN_OR_RETURN(size.index_bytes, Whole(CheckedSize(needs.index) * load.sequences));
  size.pages_capacity = copies.pages_bytes / gpu::kDeviceAlignment * gpu::kDeviceAlignment;
  size.index_capacity = copies.index_bytes / gpu::kDeviceAlignment * gpu::kDeviceAlignment;
  uint64_t tail_capacity = size.pages_capacity;
  if (size.pages_bytes > 0 && size.pages_bytes + size.tail_bytes > size.pages_capacity) {
    tail_capacity /= gpu::kCacheReserveShareMost;
    size.cache_bytes = size.pages_capacity - std::max(size.pages_capacity / gpu::kCacheReserveShare,
                                                      std::min(size.tail_bytes, tail_capacity));
  }
  size.tail_missing = size.tail_bytes - std::min(size.tail_bytes, tail_capacity);
  size.index_missing = size.index_bytes - std::min(size.index_bytes, size.index_capacity);
  size.one_index_missing = needs.index - std::min(needs.index, size.index_capacity);
  *fitting = std::min({*fitting, Fitting(tail_capacity, needs.tail, 0, load.sequences),
                       Fitting(size.index_capacity, needs.index, 0, load.sequences)});
  return size;
}

// ---- a step ----

uint64_t PartOf(double share, uint64_t whole) {
  return static_cast<uint64_t>(std::llround(share * static_cast<double>(whole)));
}

// Adds what a step reads of a segment.
void AddSegment(const SegmentForm& form, StepSize* step) {
  const uint64_t heads = uint64_t{form.shape.layers} * form.shape.kv_heads;
  const IndexLayout layout(form);
  const uint32_t middle = form.tokens - form.unclustered;
  const uint64_t exact = PartOf(step->shares.tokens, middle);
  step->exact_tokens += exact;
  step->exact_bytes += heads * exact * form.shape.token_bytes();
  step->zone_tokens += form.unclustered;
  // Rows of groups and sections are as large as those of leaves.
  step->row_bytes += heads * PartOf(step->shares.rows, layout.clusters.rows_bytes);
  step->axes_bytes += heads * layout.axes_bytes;
}

// early: whether there are the early segments that there may be.
std::optional<StepSize> StepSizeOf(const Load& load, const engine::SequenceCut& cut, bool early) {
  const auto shares = StepSharesOf(load.indexes, cut.length);
  if (!shares.has_value()) return std::nullopt;
  StepSize step;
  step.shares = *shares;
  for (const SegmentForm& form : cut.segments) AddSegment(form, &step);
  if (early) {
    for (const SegmentForm& form : cut.early) AddSegment(form, &step);
  }
  step.zone_tokens += cut.length - (early ? cut.early_end : cut.tail_begin);
  const uint64_t token_bytes =
      uint64_t{load.shape.layers} * load.shape.kv_heads * load.shape.token_bytes();
  step.zone_bytes = step.zone_tokens * token_bytes;
  step.dense_bytes = cut.length * token_bytes;
  return step;
}

}  // namespace

absl::StatusOr<LoadSize> SizeOf(const Load& load) {
  ATTND_RETURN_IF_ERROR(CheckLoad(load));
  LoadSize size;
  ATTND_ASSIGN_OR_RETURN(size.sequence, SequenceSizeOf(load));
  ATTND_ASSIGN_OR_RETURN(size.host, HostSizeOf(load, size.sequence));
  size.fitting_sequences = FittingInMemory(load, size.sequence, size.host);
  if (load.gpu_memory_bytes != 0) {
    ATTND_ASSIGN_OR_RETURN(size.gpu, GpuSizeOf(load, size.sequence, &size.fitting_sequences));
  }
  const bool early = size.host.early_bytes == load.sequences * size.sequence.early_bytes;
  size.step = StepSizeOf(load, size.sequence.cut, early);
  size.fits = size.fitting_sequences == load.sequences;
  return size;
}

}  // namespace attnd::ctl
