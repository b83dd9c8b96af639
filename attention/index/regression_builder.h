// SPDX-License-Identifier: Apache-2.0
//
// RegressionBuilder: what describes the clusters of a segment that has a regression of values on
// keys: means, principal axes, variances along them, slopes and what is left (docs/POLICIES.md,
// "Clusters with a regression").
#ifndef ATTND_ATTENTION_INDEX_REGRESSION_BUILDER_H_
#define ATTND_ATTENTION_INDEX_REGRESSION_BUILDER_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/index/principal_axes.h"
#include "attention/segment/segment.h"

namespace attnd::attention {

// How the clusters themselves are made: keys and values, each over their root mean square distance
// from the segment's mean, values with this weight; this share of the clusters late (KMeans).
inline constexpr double kValueShare = 0.5;
inline constexpr double kLateShare = 0.25;

// Describes heads one after another, in chunks; keeps its scratch memory between heads. One thread
// at a time.
class RegressionBuilder {
 public:
  // Scratch memory at most, for clusters of kClusterTokens on average.
  static uint64_t ScratchBytes(const SegmentForm& form);

  // What to describe: one (layer, KV head), its tokens in their places. Everything outlives the
  // building.
  struct Head {
    const SegmentForm* form = nullptr;
    const IndexLayout* layout = nullptr;
    const std::byte* pages = nullptr;  // of the head
    std::byte* index = nullptr;        // of the head: its clusters' number and starts are filled in
  };
  void Start(const Head& head);
  // Works on some tokens, for a tenth of a millisecond up to head_dim 256. True while there is more
  // to do.
  bool RunChunk();

 private:
  // Each but the axes passes over all tokens: every one needs what the one before has found.
  enum class Stage { kMeans, kMoments, kAxes, kVariances, kResiduals, kDone };

  void NextStage();
  void PassSome();
  void LoadTokens(uint32_t begin, uint32_t end);
  void SumMeans();
  void SumMoments();
  void SumVariances();
  void SumResiduals();
  void EndCluster(uint32_t cluster);
  void FindCoordinates();
  void StoreMeans(uint32_t cluster);
  void StoreAxes();
  void StoreVariances(uint32_t cluster);
  void StoreSlopes();

  Head head_;
  size_t dim_ = 0;  // of keys
  size_t value_dim_ = 0;
  Stage stage_ = Stage::kDone;
  uint32_t chunk_tokens_ = 0;
  uint32_t next_ = 0;     // token of the stage's next chunk
  uint32_t cluster_ = 0;  // that it is in
  std::vector<uint32_t> starts_;

  // The chunk's tokens, [chunk_tokens][...], and their clusters.
  uint32_t count_ = 0;
  std::vector<float> keys_;         // less their centroids, after kMeans
  std::vector<float> values_;       // less their mean values, after kMeans
  std::vector<float> coordinates_;  // along the axes
  std::vector<float> quad_;         // [max(dim, chunk_tokens)][4] weights for kernels
  std::vector<float> sums_;         // [4][max(dim, value_dim)] of kernels

  std::vector<float> centroids_;     // [clusters][dim]
  std::vector<float> mean_values_;   // [clusters][value_dim]
  std::vector<float> stored_value_;  // [value_dim]
  std::vector<double> cluster_sum_;  // of the cluster that a pass is in
  std::vector<double> moments_;      // [dim][dim] sum of keys' products
  std::vector<float> by_channel_;    // [dim][dim] axes, a row for each channel
  std::vector<double> cross_;        // [value_dim][dim] sum of values' products with coordinates
  std::vector<double> squares_;      // [dim] sum of squared coordinates
  PrincipalAxes axes_;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_INDEX_REGRESSION_BUILDER_H_
