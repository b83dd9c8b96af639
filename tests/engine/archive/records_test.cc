// SPDX-License-Identifier: Apache-2.0
//
// Goal: what a sealed file says of itself is read as it was written. Method: metadata there and
// back; tests/fuzz/metadata_fuzz.cc does so with bytes that nobody wrote.
#include "engine/archive/records.h"

#include <gtest/gtest.h>

#include <string>

#include "engine/archive/archive.pb.h"
#include "tests/tree_indexes.h"

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
  EXPECT_EQ(back->sections, metadata.sections);
  EXPECT_EQ(back->args.indexes, metadata.args.indexes.value_or(attention::kClusterIndexes));
}

TEST(ArchiveRecordsTest, MetadataIsReadBack) { ExpectReadBack(MetadataOf("tenant", "model")); }

TEST(ArchiveRecordsTest, SectionsAreReadBack) {
  FileMetadata metadata = MetadataOf("tenant", "model");
  metadata.args.indexes = attention::kTreeIndexes;
  metadata.sections = true;
  ExpectReadBack(metadata);
}

TEST(ArchiveRecordsTest, ATreesSizesAreReadBack) {
  FileMetadata metadata = MetadataOf("tenant", "model");
  metadata.args.indexes = attnd::test::TreeOf({12, 16, 3});
  metadata.sections = true;
  ExpectReadBack(metadata);
  metadata.args.indexes = attnd::test::TreeOf({16, 4, 2});
  metadata.sections = false;
  ExpectReadBack(metadata);
}

TEST(ArchiveRecordsTest, ALatentShapeIsReadBack) {
  FileMetadata metadata = MetadataOf("tenant", "model");
  metadata.args.shape.latent = true;
  ExpectReadBack(metadata);
  metadata.args.shape.value_dim = 48;
  EXPECT_TRUE(absl::IsDataLoss(
      DecodeMetadata(EncodeMetadata(metadata), storage::SegmentKind::kClusters).status()));
}

// What was written so, and is not known, is of a newer version and no damage: nobody puts such a
// file away.
TEST(ArchiveRecordsTest, MetadataOfANewerVersionIsNoDamage) {
  const auto decoded = [](const auto& change, storage::SegmentKind kind) {
    FileMetadata metadata = MetadataOf("tenant", "model");
    metadata.sealed_id = 1;
    metadata.args.policy = *attention::ParsePolicy("error-target");
    archive::Metadata message;
    EXPECT_TRUE(message.ParseFromString(EncodeMetadata(metadata)));
    change(&message);
    return DecodeMetadata(message.SerializeAsString(), kind).status();
  };
  constexpr auto kSegment = storage::SegmentKind::kClusters, kTail = storage::SegmentKind::kTail;
  const auto indexes = [](uint32_t bits) {
    return [bits](archive::Metadata* message) { message->mutable_model()->set_indexes(bits); };
  };
  EXPECT_TRUE(decoded(indexes(1 | 1u << 8), kSegment).ok());             // a tree
  EXPECT_TRUE(decoded(indexes(1 | 1u << 8 | 1u << 31), kSegment).ok());  // with sections
  EXPECT_TRUE(absl::IsDataLoss(decoded(indexes(1 | 1u << 1 | 1u << 31), kSegment)));
  EXPECT_TRUE(absl::IsFailedPrecondition(decoded(indexes(1 | 1u << 9), kSegment)));
  EXPECT_TRUE(absl::IsFailedPrecondition(decoded(indexes(1 | 1u << 1 | 1u << 30), kSegment)));
  // Sizes of a tree: known ones, unknown ones, sizes of no tree, sections over two levels.
  EXPECT_TRUE(decoded(indexes(1 | 1u << 8 | 1u << 25 | 2u << 27 | 1u << 29), kSegment).ok());
  for (const uint32_t unknown : {1u << 8 | 3u << 25, 1u << 8 | 3u << 27, 1u << 8 | 2u << 29,
                                 1u << 1 | 1u << 25, 1u << 8 | 1u << 29 | 1u << 31}) {
    EXPECT_TRUE(absl::IsFailedPrecondition(decoded(indexes(1 | unknown), kSegment))) << unknown;
  }
  EXPECT_TRUE(absl::IsDataLoss(decoded(indexes(1u << 1), kSegment)));
  EXPECT_TRUE(absl::IsDataLoss(decoded(indexes(1 | 1u << 1 | 1u << 7), kSegment)));
  EXPECT_TRUE(absl::IsFailedPrecondition(decoded(
      [](archive::Metadata* message) { message->mutable_model()->set_dtype(9); }, kSegment)));
  EXPECT_TRUE(absl::IsDataLoss(decoded(
      [](archive::Metadata* message) { message->mutable_model()->set_dtype(0); }, kSegment)));
  EXPECT_TRUE(absl::IsFailedPrecondition(decoded(
      [](archive::Metadata* message) { message->mutable_model()->set_shard_kind(9); }, kSegment)));
  EXPECT_TRUE(decoded([](archive::Metadata*) {}, kTail).ok());
  EXPECT_TRUE(
      decoded(
          [](archive::Metadata* message) {
            (*message->mutable_sealed()->mutable_policy()->mutable_parameters())["quantile"] =
                "0.95";
          },
          kTail)
          .ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(decoded(
      [](archive::Metadata* message) {
        (*message->mutable_sealed()->mutable_policy()->mutable_parameters())["of_tomorrow"] = "1";
      },
      kTail)));
}

// A tenant is bytes, as storage/catalogue/records.proto says: nobody promised that it is UTF-8.
TEST(ArchiveRecordsTest, ATenantIsAnyBytes) {
  ExpectReadBack(MetadataOf("tenant \xff\xfe", "model"));
  ExpectReadBack(MetadataOf("tenant", "model \xff\xfe"));
}

}  // namespace
}  // namespace attnd::engine::test
