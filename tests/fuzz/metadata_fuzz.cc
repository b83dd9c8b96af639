// SPDX-License-Identifier: Apache-2.0
//
// Goal: no metadata of a segment file makes its parser crash; what it takes has a valid shape,
// token ids in order and finite bounds, and is written again as it was read. No checksum stands
// before it. An input's first byte says which kind of file the rest is taken from.
#include <google/protobuf/stubs/logging.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "attention/policy/policy.h"
#include "engine/archive/records.h"
#include "tests/fuzz/target.h"

namespace attnd::fuzz {
namespace {

using engine::FileMetadata;
using storage::SegmentKind;

bool SameRuns(const FileMetadata& a, const FileMetadata& b) {
  if (a.token_ids.size() != b.token_ids.size()) return false;
  for (size_t i = 0; i < a.token_ids.size(); ++i) {
    if (a.token_ids[i].first_position != b.token_ids[i].first_position) return false;
    if (a.token_ids[i].ids != b.token_ids[i].ids) return false;
  }
  return true;
}

bool Same(const FileMetadata& a, const FileMetadata& b) {
  return a.tenant == b.tenant && a.args.fingerprint == b.args.fingerprint &&
         a.args.shape == b.args.shape && a.args.indexes == b.args.indexes &&
         a.sections == b.sections && SameRuns(a, b) && a.key_bounds == b.key_bounds &&
         a.sealed_id == b.sealed_id && a.tokens == b.tokens && a.sealed_unix_s == b.sealed_unix_s;
}

void CheckTaken(const FileMetadata& metadata, SegmentKind kind) {
  if (!metadata.args.shape.Validate().ok()) Fail("a shape that is none");
  uint64_t end = 0;
  for (const auto& run : metadata.token_ids) {
    if (run.ids.empty() || run.first_position < end) Fail("token ids in no order");
    end = run.first_position + run.ids.size();
  }
  const bool tail = kind == SegmentKind::kTail;
  if (tail && (metadata.sealed_id == 0 || !metadata.args.policy.has_value())) Fail("no sequence");
  if (!tail && metadata.key_bounds.size() != metadata.args.shape.layers) Fail("no bounds");
  for (const float bound : metadata.key_bounds) {
    if (!std::isfinite(bound) || bound < 0) Fail("a bound that is none");
  }
  const auto again = engine::DecodeMetadata(engine::EncodeMetadata(metadata), kind);
  if (!again.ok() || !Same(metadata, *again)) Fail("metadata is not read back");
}

}  // namespace

void Fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

std::string GoodInput(std::mt19937_64* random) {
  FileMetadata metadata;
  metadata.tenant = std::string(Below(random, 20), 't');
  metadata.args.fingerprint = "model";
  metadata.args.shape.layers = static_cast<uint32_t>(1 + Below(random, 4));
  metadata.args.shape.query_heads = 4;
  metadata.args.shape.kv_heads = 2;
  metadata.args.shape.head_dim = 64;
  metadata.args.shape.value_dim = 64;
  metadata.args.shape.softmax_scale = 0.125F;
  for (uint64_t first = 0; Below(random, 4) != 0; first += 10) {
    metadata.token_ids.push_back({first, std::vector<uint32_t>(1 + Below(random, 8), 7)});
  }
  const bool tail = Below(random, 2) == 0;
  if (tail) {
    metadata.sealed_id = 1 + Below(random, 1000);
    metadata.tokens = Below(random, 1000);
    metadata.sealed_unix_s = 1700000000;
    metadata.args.policy = attention::ParsePolicy("dense", {{"window", "64"}}).value();
  } else {
    metadata.key_bounds.assign(metadata.args.shape.layers, 1.5F);
  }
  std::string input(1, tail ? '\1' : '\0');
  input += engine::EncodeMetadata(metadata);
  return input;
}

}  // namespace attnd::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  using namespace attnd;  // NOLINT(google-build-using-namespace)
  // It says a line for each text that is not UTF-8.
  static const bool quiet = (google::protobuf::SetLogHandler(nullptr), true);
  if (!quiet || bytes == 0) return 0;
  const auto kind =
      (data[0] & 1) != 0 ? storage::SegmentKind::kTail : storage::SegmentKind::kClusters;
  const std::string text(reinterpret_cast<const char*>(data) + 1, bytes - 1);
  const auto metadata = engine::DecodeMetadata(text, kind);
  if (metadata.ok()) {
    fuzz::CheckTaken(*metadata, kind);
  } else if (!absl::IsDataLoss(metadata.status()) &&
             !absl::IsFailedPrecondition(metadata.status())) {  // of a newer version
    fuzz::Fail("an error of another kind");
  }
  return 0;
}
