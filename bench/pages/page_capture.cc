// SPDX-License-Identifier: Apache-2.0
#include "bench/pages/page_capture.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "attention/segment/run_tokens.h"
#include "bench/build_segment.h"

namespace attnd::bench {
namespace {

using attention::kTailBlockTokens;
using attention::PageGeometry;
using attention::SequenceView;
using attention::TailBlock;

constexpr uint32_t kSegmentTokens = 8192;
constexpr uint32_t kSegmentTokensMin = 512;
constexpr uint32_t kSink = 4;
constexpr uint32_t kWindow = 64;
constexpr char kMagic[8] = {'A', 'T', 'N', 'D', 'C', 'A', 'P', '1'};
constexpr uint32_t kTokensMax = 1 << 20;

absl::StatusOr<ModelShape> CheckHeader(const CaptureHeader& header) {
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) {
    return absl::DataLossError("it is no capture");
  }
  ModelShape shape;
  shape.layers = header.layers;
  shape.query_heads = header.query_heads;
  shape.kv_heads = header.kv_heads;
  shape.head_dim = shape.value_dim = header.head_dim;
  shape.dtype = DType::kBf16;
  shape.softmax_scale = header.softmax_scale;
  if (absl::Status status = shape.Validate(); !status.ok()) return status;
  if (header.prompt_tokens == 0 || header.prompt_tokens > kTokensMax ||
      header.decoded_tokens == 0 || header.decoded_tokens > kTokensMax) {
    return absl::DataLossError(absl::StrCat("tokens are not within 1 .. ", kTokensMax));
  }
  return shape;
}

// Reads the rows [kv_heads][tokens] of a layer into the pages of the tail's blocks.
void ReadRows(std::ifstream& file, uint32_t layer, uint32_t tokens, bool values,
              const SequenceView& view) {
  const PageGeometry geometry(view.shape);
  for (uint32_t head = 0; head < view.shape.kv_heads; ++head) {
    for (uint32_t token = 0; token < tokens; ++token) {
      std::byte* pages = view.tail[token / kTailBlockTokens]->pages(layer, head);
      const uint32_t row = token % kTailBlockTokens;
      const size_t offset = values ? geometry.ValueOffset(row) : geometry.KeyOffset(row);
      file.read(reinterpret_cast<char*>(pages + offset),
                static_cast<std::streamsize>(geometry.key_row_bytes));
    }
  }
}

std::shared_ptr<const SequenceView> SegmentPrompt(std::shared_ptr<const SequenceView> view,
                                                  uint64_t prompt_tokens, uint32_t threads,
                                                  bool sections, attention::Backend* device) {
  while (prompt_tokens >= view->tail_begin + kWindow + kSegmentTokensMin) {
    const uint64_t left = prompt_tokens - kWindow - view->tail_begin;
    const uint32_t run = attention::RunTokens(view->indexes, view->tail_begin, kSegmentTokens);
    view = WithSegment(view, static_cast<uint32_t>(std::min<uint64_t>(left, run)), kSink, threads,
                       sections, device);
  }
  return view;
}

}  // namespace

absl::StatusOr<ModelShape> ReadCaptureHeader(const std::string& path, std::ifstream* file,
                                             CaptureHeader* header) {
  if (!*file) return absl::UnavailableError(absl::StrCat(path, " cannot be read"));
  file->read(reinterpret_cast<char*>(header), sizeof(*header));
  absl::StatusOr<ModelShape> shape = CheckHeader(*header);
  if (!shape.ok()) return absl::DataLossError(absl::StrCat(path, ": ", shape.status().message()));
  return shape;
}

absl::StatusOr<PageCapture> ReadPageCapture(const std::string& path, attention::IndexSet indexes,
                                            uint32_t threads, bool sections,
                                            attention::Backend* device) {
  std::ifstream file(path, std::ios::binary);
  CaptureHeader header{};
  const absl::StatusOr<ModelShape> shape = ReadCaptureHeader(path, &file, &header);
  if (!shape.ok()) return shape.status();

  PageCapture capture;
  capture.prompt_tokens = header.prompt_tokens;
  capture.decoded_tokens = header.decoded_tokens;
  auto view = std::make_shared<SequenceView>();
  view->shape = *shape;
  view->indexes = indexes;
  const uint32_t tokens = header.prompt_tokens + header.decoded_tokens;
  for (uint32_t begin = 0; begin < tokens; begin += kTailBlockTokens) {
    view->tail.push_back(std::make_shared<TailBlock>(*shape));
  }
  const size_t layer_bytes = size_t{header.decoded_tokens} * shape->query_heads * shape->head_dim *
                             DTypeBytes(shape->dtype);
  capture.queries.resize(shape->layers * layer_bytes);
  for (uint32_t layer = 0; layer < shape->layers; ++layer) {
    ReadRows(file, layer, tokens, /*values=*/false, *view);
    ReadRows(file, layer, tokens, /*values=*/true, *view);
    file.read(reinterpret_cast<char*>(capture.queries.data() + layer * layer_bytes),
              static_cast<std::streamsize>(layer_bytes));
  }
  if (!file) return absl::DataLossError(absl::StrCat(path, " ends early"));
  capture.view = SegmentPrompt(std::move(view), header.prompt_tokens, threads, sections, device);
  return capture;
}

}  // namespace attnd::bench
