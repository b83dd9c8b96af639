// SPDX-License-Identifier: Apache-2.0
#include "engine/archive/chain.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <type_traits>

namespace attnd::engine {
namespace {

// What is hashed is a row of fields of fixed sizes, or with their sizes before them.
class Fields {
 public:
  template <typename T>
  void Add(T value) {
    static_assert(std::is_arithmetic_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  void Add(absl::string_view text) {
    Add(uint64_t{text.size()});
    bytes_.append(text.data(), text.size());
  }
  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

std::string OwnerOf(absl::string_view tenant, const OpenArgs& args) {
  Fields fields;
  fields.Add(absl::string_view("attnd chain, clusters, 1"));
  fields.Add(tenant);
  fields.Add(absl::string_view(args.fingerprint));
  fields.Add(args.shape.layers);
  fields.Add(args.shape.query_heads);
  fields.Add(args.shape.kv_heads);
  fields.Add(args.shape.head_dim);
  fields.Add(args.shape.value_dim);
  fields.Add(static_cast<uint32_t>(args.shape.dtype));
  fields.Add(args.shape.softmax_scale);
  fields.Add(static_cast<uint32_t>(args.shard.kind));
  fields.Add(args.shard.index);
  fields.Add(args.shard.count);
  // Nothing for clusters alone, as all were before there was anything else.
  const attention::IndexSet indexes = args.indexes.value_or(attention::kClusterIndexes);
  if (indexes != attention::kClusterIndexes) fields.Add(indexes.bits());
  // Summaries are not the same under other maps.
  if (indexes.Needs(attention::ModelPart::kFeatureMaps)) {
    fields.Add(absl::string_view(args.model_parts.feature_maps_id));
  }
  // Likewise. Longer than a set of indexes, so that neither can be taken for the other.
  if (args.shape.latent) fields.Add(absl::string_view("latent"));
  // A prompt finds what was made with the channels that its own segments would have. Longer than
  // "latent".
  if (const std::string& channels = args.model_parts.label_channels_id; !channels.empty()) {
    fields.Add(absl::string_view(channels));
  }
  return fields.Take();
}

}  // namespace

ChainNames::ChainNames(const storage::Secret& secret, absl::string_view tenant,
                       const OpenArgs& args)
    : secret_(secret), owner_(OwnerOf(tenant, args)) {}

absl::StatusOr<storage::ChainId> ChainNames::NameOf(const ChainLink& link) const {
  Fields fields;
  fields.Add(absl::string_view(owner_));
  for (const uint8_t byte : link.parent) fields.Add(byte);
  fields.Add(link.first_position);
  fields.Add(link.unclustered);
  fields.Add(absl::string_view(reinterpret_cast<const char*>(link.token_ids.data()),
                               link.token_ids.size_bytes()));
  const std::string bytes = fields.Take();
  storage::ChainId name{};
  unsigned size = 0;
  if (HMAC(EVP_sha256(), secret_.data(), static_cast<int>(secret_.size()),
           reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), name.data(),
           &size) == nullptr ||
      size != name.size()) {
    return absl::InternalError("OpenSSL's HMAC-SHA256 failed");
  }
  return name;
}

absl::StatusOr<storage::ChainId> ChainNames::RandomName() {
  storage::ChainId name{};
  if (RAND_bytes(name.data(), static_cast<int>(name.size())) != 1) {
    return absl::InternalError("OpenSSL has no random bytes");
  }
  return name;
}

}  // namespace attnd::engine
