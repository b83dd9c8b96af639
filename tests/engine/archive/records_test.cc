// SPDX-License-Identifier: Apache-2.0
//
// Goal: what a sealed file says of itself is read as it was written. Method: metadata there and
// back; tests/fuzz/metadata_fuzz.cc does so with bytes that nobody wrote.
#include "engine/archive/records.h"

#include <gtest/gtest.h>

#include <string>

namespace attnd::engine::test {
namespace {

FileMetadata MetadataOf(const std::string& tenant, const std::string& fingerprint) {
  FileMetadata metadata;
  metadata.tenant = tenant;
  metadata.args.fingerprint = fingerprint;
  metadata.args.shape.layers = 1;
  metadata.args.shape.query_heads = 2;
  metadata.args.shape.kv_heads = 1;
  metadata.args.shape.head_dim = 32;
  metadata.args.shape.value_dim = 32;
  metadata.args.shape.softmax_scale = 0.5F;
  metadata.key_bounds = {1.5F};
  return metadata;
}

void ExpectReadBack(const FileMetadata& metadata) {
  const auto back = DecodeMetadata(EncodeMetadata(metadata), storage::SegmentKind::kClusters);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->tenant, metadata.tenant);
  EXPECT_EQ(back->args.fingerprint, metadata.args.fingerprint);
  EXPECT_EQ(back->args.shape, metadata.args.shape);
  EXPECT_EQ(back->key_bounds, metadata.key_bounds);
}

TEST(ArchiveRecordsTest, MetadataIsReadBack) { ExpectReadBack(MetadataOf("tenant", "model")); }

TEST(ArchiveRecordsTest, ALatentShapeIsReadBack) {
  FileMetadata metadata = MetadataOf("tenant", "model");
  metadata.args.shape.latent = true;
  ExpectReadBack(metadata);
  metadata.args.shape.value_dim = 48;
  EXPECT_TRUE(absl::IsDataLoss(
      DecodeMetadata(EncodeMetadata(metadata), storage::SegmentKind::kClusters).status()));
}

// A tenant is bytes, as storage/catalogue/records.proto says: nobody promised that it is UTF-8.
TEST(ArchiveRecordsTest, ATenantIsAnyBytes) {
  ExpectReadBack(MetadataOf("tenant \xff\xfe", "model"));
  ExpectReadBack(MetadataOf("tenant", "model \xff\xfe"));
}

}  // namespace
}  // namespace attnd::engine::test
