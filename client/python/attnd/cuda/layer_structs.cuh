// SPDX-License-Identifier: Apache-2.0
//
// The structs and numbers of layer.cu that the host has, too (structs.py).
#ifndef ATTND_CLIENT_PYTHON_ATTND_CUDA_LAYER_STRUCTS_CUH_
#define ATTND_CLIENT_PYTHON_ATTND_CUDA_LAYER_STRUCTS_CUH_

namespace {

typedef unsigned u32;
typedef unsigned long long u64;

// Why a layer's out is NaN. structs.py has the same numbers.
enum Failure : u32 {
  kNone = 0,
  kNoPass = 1,  // no pass is declared: a model that is warmed up, or a graph that is replayed twice
  kOrder = 2,   // the layer is not the pass's next
  kTokens = 3,  // the tensors have fewer tokens than the pass
  kOver = 4,    // the server is done with the pass
  kAborted = 5,  // the client's watchdog gave the pass up
  kLate = 6,     // neither happened within the limit
};

// In GPU memory, one a session, all zero at first.
struct alignas(16) Pass {
  u32 open;  // 0: no pass, or its last layer is done
  u32 first_epoch;
  u32 layers;
  u32 next_layer;
  u32 query_tokens;  // of the declaration
  u32 new_tokens;
  u32 failure;  // the pass's first Failure: nothing that was computed from its answers is of any
                // use
  u32 want_lse;
  u32 end;      // of Control::ends, the pass's own
  u32 in_twin;  // turns are taken in the region's twin, too
};
struct PassWords {
  Pass pass;
  u32 arrived;  // thread blocks of the kernel that runs
};

// Passes whose ends the host may still have to look at when the stream goes on: the newest, and the
// one before.
constexpr u32 kPassesMax = 2;

// How a pass's layers ended.
struct PassEnd {
  u32 failure;  // the first layer's without an answer
  u32 failed_layer;
  u32 failed_rows;  // once its last layer is answered
};

// In host memory of the client's own, mapped, all zero at first.
struct Control {
  // Written by the host: 2^32 + first_epoch of a pass that is given up, with all before it.
  u64 abort;
  u64 padding[7];
  // Written by the GPU. `done` last: the epoch of the last layer that has its answer, and of a
  // pass's last layer, or one without an answer, that has written out, too. (The host writes it
  // where it is of so long ago that it would count as a later pass's.)
  u32 done;
  PassEnd ends[kPassesMax];
};

// [rows, row_bytes], rows row_stride bytes apart. Addresses, strides and row_bytes are multiples
// of 16.
struct Tensor {
  u64 address;
  u64 row_stride;
  u32 row_bytes;
  u32 rows;
};

// Where a layer's tensors lie in a region, dense, in bytes from its start. Its words are the first.
struct Places {
  u32 q, k, v, out, lse;
  u32 padding;
};
constexpr u32 kRingAt = 0, kAnswerAt = 64;

struct Layer {
  Tensor q, k, v, out;  // in GPU memory
  u64 lse;              // [out.rows, lse_heads] float in GPU memory; 0: none
  u64 region;           // in host memory
  u64 twin;             // in GPU memory, the server's too; 0: there is none
  Places at;            // in both
  u64 words;            // PassWords
  u64 control;          // Control
  u64 limit_nanos;      // that a thread waits at most
  u32 lse_heads;
  u32 layer;
};

struct Begin {
  u64 words;
  u64 control;
  u32 first_epoch;
  u32 layers;
  u32 query_tokens;
  u32 new_tokens;
  u32 want_lse;
  u32 end;
  u32 in_twin;
};

}  // namespace

#endif  // ATTND_CLIENT_PYTHON_ATTND_CUDA_LAYER_STRUCTS_CUH_
