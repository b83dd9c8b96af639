// SPDX-License-Identifier: Apache-2.0
//
// KMeans: Lloyd's algorithm in small chunks, so that a background builder can yield between them
// (docs/POLICIES.md, "Clusters" and "Clusters with a regression").
#ifndef ATTND_ATTENTION_INDEX_KMEANS_H_
#define ATTND_ATTENTION_INDEX_KMEANS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace attnd::attention {

inline constexpr uint32_t kKMeansIterations = 10;

// Deterministic. Used by one thread. Keeps its memory from one Start to the next.
class KMeans {
 public:
  // points: [n][dim] floats, which must outlive the use of the clusters; n >= 1, dim is a multiple
  // of 16, 1 <= clusters <= n. The last `late` clusters, fewer than half, are made after half of
  // the iterations: each starts at the farthest member of one of the clusters with the greatest
  // sums of squares. Cluster c of the others starts at point floor(c n / (clusters - late)).
  void Start(std::span<const float> points, size_t n, size_t dim, size_t clusters, size_t late = 0);

  // Works for about a tenth of a millisecond. False when the last iteration is complete.
  bool RunChunk();

  // After the last chunk. assignment()[i] is the cluster of point i; a cluster's mean is sums /
  // size, and a cluster of size 0 has no mean.
  std::span<const uint32_t> assignment() const { return assignment_; }
  std::span<const uint32_t> sizes() const { return sizes_; }
  std::span<const double> sums(size_t cluster) const {
    return std::span<const double>(sums_).subspan(cluster * dim_, dim_);
  }

 private:
  // Seed, then (assign, move) for each iteration but the last, which ends with its assignment. The
  // late clusters are made (split) after half of the iterations.
  enum class Phase { kSeed, kAssign, kMove, kSplit, kDone };

  void AssignSome();
  void FindFarthest();
  void MakeLateClusters();
  void SetSome();
  void SetCentroid(size_t cluster, const float* values);

  std::span<const float> points_;
  size_t n_ = 0;
  size_t dim_ = 0;
  size_t clusters_ = 0;
  size_t early_ = 0;   // clusters that are not late
  size_t stride_ = 0;  // clusters, padded for the kernel
  Phase phase_ = Phase::kDone;
  uint32_t iteration_ = 0;
  size_t next_ = 0;                 // point or cluster at which the phase goes on
  std::vector<float> centroids_t_;  // [dim][stride]
  std::vector<float> half_norms_;   // [stride]
  std::vector<double> sums_;        // [clusters][dim]
  std::vector<uint32_t> sizes_;
  std::vector<uint32_t> assignment_;
  std::vector<float> mean_;  // [dim] scratch
  // What is known of an early cluster while the late clusters are made.
  struct Spread {
    double squares = 0;    // sum of the members' squared distances
    double farthest = -1;  // the greatest of them
    size_t point = 0;      // the first member at that distance
  };
  std::vector<Spread> spreads_;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_INDEX_KMEANS_H_
