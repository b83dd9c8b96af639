// SPDX-License-Identifier: Apache-2.0
//
// attnd_layer: one layer of a pass over shared memory, as a kernel of the client's stream.
// attnd_begin: the first kernel of a pass.
//
// NVRTC compiles this file when a session is made (compiler.py). The tests compile it as C++ and
// run it on the CPU (tests/python/emulated_layer.cc).
//
// A kernel of a layer has a few thread blocks. Each copies a part of q, k and v into the region and
// arrives. The last to arrive rings, waits for the answer and copies out and lse to GPU memory; the
// others have ended by then. One thread alone looks for the answer, with time between two looks at
// the region: that is a read over PCIe, and kernels of any process on the GPU wait for such reads
// where one of theirs follows another. Six thread blocks that looked without a pause made the
// server's own kernels four times as slow (docs/research/MODEL_LOOP.md, "How a waiting kernel
// waits").
//
// A region's twin is memory of this GPU. In a pass whose turns are taken there, too, the thread
// blocks copy q, k and v there, and the last one rings there; then it alone copies them into the
// region and rings there as well, beside the server's GPU, which has begun. The answer may come in
// either.
//
// Order in memory. The region is host memory that the GPU has mapped (proto, PassMemory), the twin
// GPU memory that another process's kernels write and read, which takes system scope as well.
//
// On the way in, to either of them, a thread block's barrier puts the writes of its threads before
// thread 0's fence of system scope, and that before its arrival (an atomic). Who arrives last has
// seen all arrivals; its fence and its release of the ring word put all writes of q, k and v before
// the ring for the host, which reads the word with acquire. Of a single thread block the release
// alone does: each fence waits for what is on its way over PCIe.
//
// On the way out, the acquire of the look that saw the answer, and the barrier behind it, put what
// the server has released, by its host or by a kernel of its own, before the reads of the other
// threads. They read the region or its twin, wherever the answer was seen, with relaxed loads of
// system scope: no cache answers with what an earlier layer left. There is no fence behind the
// look: it would wait for all that is on its way.
// The server may write both words of its answer by one store, of which a look reads a half: that
// this is whole, and ordered as if it had been written alone, is the GPU's doing, not PTX's
// promise.
//
// A Pass changes in attnd_begin and by the last thread block to arrive, when all others have read
// it; `arrived`, which all count up, is an atomic. The stream orders kernels.
//
// A model waits for each layer's kernel, from its first instruction to its last. So it is launched
// to be there when the kernel before it ends (AwaitStream); a thread asks for its first share of q,
// k and v before it knows whether there is a pass; and an answer is noted while it is copied, as
// the end of a kernel waits for its writes over PCIe, too.
//
// Words that an earlier pass left are never taken for a turn: a layer's epoch is first_epoch, which
// attnd_begin writes in stream order, plus the layer. The answer word counts upwards modulo 2^32.
// An answer beyond the epoch says that the server is done with the pass.

#if defined(__CUDACC__)
#include "layer_device.cuh"
#else
#define ATTND_DEVICE
#endif
#include "layer_structs.cuh"

namespace {

// NaN in bf16 and fp16, and, two of them together, in fp32.
constexpr u32 kNan = 0x7FFF7FFF;
// Loads that a thread has under way at once.
constexpr u32 kBatch = 4;
// Between two looks at the region's answer word where there is no other: the first ones, some 40 us
// of them, within which few answers come; and later ones. Half of it is what an answer waits in the
// mean.
constexpr u32 kFirstLooks = 16;
constexpr u32 kFirstPauseNanos = 1000;
constexpr u32 kPauseNanos = 300;
// Looks at the twin's answer word, some .7 us each, in place of the pause. What comes in the region
// alone waits some 3 us in the mean.
constexpr u32 kTwinLooks = 8;
// Looks at the answer word between two at the abort word, as each crosses PCIe.
constexpr u32 kLooksPerAbort = 16;

template <typename T>
ATTND_DEVICE T* At(u64 address) {
  return reinterpret_cast<T*>(address);
}

// Number `index` of the tensor's quads, row by row.
ATTND_DEVICE Quad* QuadOf(const Tensor& tensor, u32 index) {
  const u32 row_quads = tensor.row_bytes / sizeof(Quad);
  const u32 row = index / row_quads;
  return At<Quad>(tensor.address + row * tensor.row_stride) + (index - row * row_quads);
}

// Fewer than 2^28: a tensor of a session has less than 4 GiB (session.py).
ATTND_DEVICE u32 Quads(const Tensor& tensor, u32 rows) {
  return rows * (tensor.row_bytes / static_cast<u32>(sizeof(Quad)));
}

// Thread blocks that copy together, and which of them this is.
struct Team {
  u32 blocks, block;
};

// A thread's quads that are on their way at once: every step-th of `count` from `first` on.
struct Batch {
  Quad quads[kBatch];

  template <typename Load>
  ATTND_DEVICE void From(u32 first, u32 step, u32 count, Load load) {
#pragma unroll
    for (u32 i = 0; i < kBatch; ++i) {
      if (first + i * step < count) quads[i] = load(first + i * step);
    }
  }
  template <typename Store>
  ATTND_DEVICE void To(u32 first, u32 step, u32 count, Store store) const {
#pragma unroll
    for (u32 i = 0; i < kBatch; ++i) {
      if (first + i * step < count) store(first + i * step, quads[i]);
    }
  }
};

// This thread's first batch of `count` quads.
template <typename Load>
ATTND_DEVICE Batch FirstOf(const Team& team, u32 count, Load load) {
  Batch batch;
  batch.From(team.block * Threads() + Thread(), team.blocks * Threads(), count, load);
  return batch;
}

// This thread's part of `count` quads, a batch at a time: all of its loads before its stores.
// batch: FirstOf the same.
template <typename Load, typename Store>
ATTND_DEVICE void Copy(const Team& team, u32 count, Batch batch, Load load, Store store) {
  const u32 step = team.blocks * Threads();
  for (u32 first = team.block * Threads() + Thread(); first < count;) {
    batch.To(first, step, count, store);
    first += kBatch * step;
    batch.From(first, step, count, load);
  }
}
// The same by one thread block.
template <typename Load, typename Store>
ATTND_DEVICE void Copy(u32 count, Load load, Store store) {
  const Team alone = {1, 0};
  Copy(alone, count, FirstOf(alone, count, load), load, store);
}

// Quads of q, k and v, of so many tokens, one tensor behind the other: all three at once are on
// their way.
class Inputs {
 public:
  ATTND_DEVICE Inputs(const Layer& layer, u32 query_tokens, u32 new_tokens)
      : layer_(layer),
        k_(Quads(layer.q, query_tokens)),
        v_(k_ + Quads(layer.k, new_tokens)),
        end_(v_ + Quads(layer.v, new_tokens)) {}

  ATTND_DEVICE bool operator==(const Inputs& other) const {
    return k_ == other.k_ && v_ == other.v_ && end_ == other.end_;
  }
  ATTND_DEVICE Batch First(const Team& team) const {
    return FirstOf(team, end_, [&](u32 i) { return Load(i); });
  }
  // To the region, or to its twin. first: First of the same team.
  ATTND_DEVICE void CopyTo(u64 to, const Team& team, const Batch& first) const {
    Copy(
        team, end_, first, [&](u32 i) { return Load(i); },
        [&](u32 i, const Quad& quad) { *Place(to, i) = quad; });
  }

 private:
  ATTND_DEVICE Quad Load(u32 i) const {
    if (i < k_) return *QuadOf(layer_.q, i);
    return i < v_ ? *QuadOf(layer_.k, i - k_) : *QuadOf(layer_.v, i - v_);
  }
  ATTND_DEVICE Quad* Place(u64 to, u32 i) const {
    if (i < k_) return At<Quad>(to + layer_.at.q) + i;
    return i < v_ ? At<Quad>(to + layer_.at.k) + (i - k_) : At<Quad>(to + layer_.at.v) + (i - v_);
  }

  const Layer& layer_;
  const u32 k_, v_, end_;  // the first quads of k and v, and the end
};

// By one thread block, as FillAnswer is. from: the region, or its twin.
ATTND_DEVICE void CopyAnswer(const Layer& layer, const Pass& pass, u64 from) {
  // What an earlier pass left in the region is no lse of this one.
  const bool want_lse = layer.lse != 0 && pass.want_lse != 0;
  const u32 rows = pass.query_tokens;
  const u32 words = layer.lse != 0 ? rows * layer.lse_heads : 0;
  const auto lse = [&](u32 i) {
    return want_lse && i < words ? LoadHost(At<u32>(from + layer.at.lse) + i) : kNan;
  };
  const u32 first_lse = lse(Thread());  // on its way while out is
  Copy(
      Quads(layer.out, rows), [&](u32 i) { return LoadHost(At<Quad>(from + layer.at.out) + i); },
      [&](u32 i, const Quad& value) { *QuadOf(layer.out, i) = value; });
  for (u32 i = Thread(); i < words; i += Threads()) {
    At<u32>(layer.lse)[i] = i == Thread() ? first_lse : lse(i);
  }
}

// Every row from `first_row` on.
ATTND_DEVICE void FillAnswer(const Layer& layer, u32 first_row, u32 value) {
  const u32 first = Quads(layer.out, first_row);
  const Quad quad = {value, value, value, value};
  Copy(
      Quads(layer.out, layer.out.rows) - first, [&](u32) { return quad; },
      [&](u32 i, const Quad& filled) { *QuadOf(layer.out, first + i) = filled; });
  if (layer.lse == 0) return;
  const u32 words = layer.out.rows * layer.lse_heads;
  u32 i = first_row * layer.lse_heads + Thread();
  for (; i < words; i += Threads()) At<u32>(layer.lse)[i] = value;
}

// Whether the layer may have a turn. All threads find the same.
ATTND_DEVICE u32 Admit(const Layer& layer, const Pass& pass) {
  if (!pass.open) return kNoPass;
  if (pass.failure != kNone) return pass.failure;
  if (layer.layer != pass.next_layer || layer.layer >= pass.layers) return kOrder;
  const bool short_of = layer.q.rows < pass.query_tokens || layer.out.rows < pass.query_tokens ||
                        layer.k.rows < pass.new_tokens ||
                        (layer.v.row_bytes > 0 && layer.v.rows < pass.new_tokens);
  return short_of ? kTokens : kNone;
}

// Thread 0 of each thread block, behind a barrier: what its threads have written is there before it
// arrives. Whether all others had arrived before.
ATTND_DEVICE bool ArrivesLast(PassWords* words) {
  if (Blocks() == 1) return true;
  FenceSystem();
  if (AddOne(&words->arrived) + 1 != Blocks()) return false;
  FenceSystem();
  words->arrived = 0;
  return true;
}

ATTND_DEVICE u32 EpochOf(const Layer& layer, const Pass& pass) {
  return pass.first_epoch + layer.layer;
}
ATTND_DEVICE bool IsLast(const Layer& layer, const Pass& pass) {
  return layer.layer + 1 >= pass.layers;
}

// Rings in the twin. What its answer word was left at may be of any time, as the server does not
// write it in each pass: 2^32 epochs later it would be taken for this layer's answer.
ATTND_DEVICE void RingInTwin(const Layer& layer, u32 epoch) {
  StoreRelaxed(At<u32>(layer.twin + kAnswerAt), epoch - 1);
  StoreRelease(At<u32>(layer.twin + kRingAt), epoch);
}

// Whether the twin has the answer by now, in so many looks.
ATTND_DEVICE bool IsAnsweredInTwin(const Layer& layer, u32 epoch, u32 looks) {
  for (u32 look = 0; look < looks; ++look) {
    if (LoadAcquire(At<u32>(layer.twin + kAnswerAt)) == epoch) return true;
  }
  return false;
}

// One thread, when q, k and v are in the region. in_twin: and have been rung for in its twin.
// answered_in: the region or its twin, if there is an answer.
ATTND_DEVICE u32 TakeTurn(const Layer& layer, const Pass& pass, bool in_twin, u64* answered_in) {
  const u32 epoch = EpochOf(layer, pass);
  StoreRelease(At<u32>(layer.region + kRingAt), epoch);
  // The server never tells of a pass's last layer there.
  const u32 twin_looks = in_twin && !IsLast(layer, pass) ? kTwinLooks : 0;
  const u64 start = Nanos();
  for (u32 looks = 1;; ++looks) {
    if (IsAnsweredInTwin(layer, epoch, twin_looks)) {
      *answered_in = layer.twin;
      return kNone;
    }
    const u32 ahead = LoadAcquire(At<u32>(layer.region + kAnswerAt)) - epoch;
    if (ahead == 0) {
      *answered_in = layer.region;
      return kNone;
    }
    if (ahead < 1u << 31) return kOver;
    if (looks % kLooksPerAbort == 0) {
      const u64 abort = LoadAcquire(&At<Control>(layer.control)->abort);
      const u32 behind = static_cast<u32>(abort) - pass.first_epoch;
      if (abort >> 32 != 0 && behind < 1u << 31) return kAborted;
      if (Nanos() - start > layer.limit_nanos) return kLate;
    }
    if (twin_looks == 0) Pause(looks < kFirstLooks ? kFirstPauseNanos : kPauseNanos);
  }
}

// One thread, before out is written, of a layer with an answer that is not the pass's last.
ATTND_DEVICE void NoteAnswer(const Layer& layer, const Pass& pass) {
  At<PassWords>(layer.words)->pass.next_layer = layer.layer + 1;
  StoreRelaxed(&At<Control>(layer.control)->done, EpochOf(layer, pass));
}

// One thread, when out and lse are written, of a layer without an answer or a pass's last one.
// answered_in: TakeTurn's.
ATTND_DEVICE void EndLayer(const Layer& layer, const Pass& pass, u32 failure, u64 answered_in) {
  Pass* const words = &At<PassWords>(layer.words)->pass;
  Control* const control = At<Control>(layer.control);
  PassEnd* const end = &control->ends[pass.end];
  if (failure != kNone && pass.failure == kNone) {
    words->failure = failure;
    end->failure = failure;
    end->failed_layer = layer.layer;
  }
  if (!pass.open) return;
  words->next_layer = layer.layer + 1;
  if (IsLast(layer, pass)) {
    words->open = 0;
    // Nothing writes the word anew before the next pass's first ring.
    if (failure == kNone) end->failed_rows = LoadHost(At<u32>(answered_in + kAnswerAt) + 1);
  }
  StoreRelease(&control->done, EpochOf(layer, pass));
}

// What the threads of a thread block share.
struct Shared {
  u32 failure;
  u32 last;  // whether the thread block arrived last
  u64 answered_in;
};

ATTND_DEVICE void RunLayer(const Layer& layer, Shared* shared) {
  const Team all = {Blocks(), Block()}, alone = {1, 0};
  PassWords* const words = At<PassWords>(layer.words);
  AwaitStream();
  // On its way beside the pass's words: as a rule the pass has as many tokens as the tensors.
  const Inputs expected(layer, layer.q.rows, layer.k.rows);
  const Batch first = expected.First(all);
  const Pass pass = words->pass;
  const Inputs inputs(layer, pass.query_tokens, pass.new_tokens);
  const bool in_twin = layer.twin != 0 && pass.in_twin != 0;
  u32 failure = Admit(layer, pass);
  if (failure == kNone) {
    inputs.CopyTo(in_twin ? layer.twin : layer.region, all,
                  inputs == expected ? first : inputs.First(all));
  }
  Barrier();
  if (Thread() == 0) {
    shared->last = ArrivesLast(words);
    if (shared->last && failure == kNone && in_twin) RingInTwin(layer, EpochOf(layer, pass));
  }
  Barrier();
  if (!shared->last) return;
  // While the server's GPU begins with what is in the twin.
  if (failure == kNone && in_twin) inputs.CopyTo(layer.region, alone, inputs.First(alone));
  Barrier();
  if (Thread() == 0) {
    if (failure == kNone) failure = TakeTurn(layer, pass, in_twin, &shared->answered_in);
    shared->failure = failure;
    if (failure == kNone && !IsLast(layer, pass)) NoteAnswer(layer, pass);
  }
  Barrier();
  failure = shared->failure;
  if (failure == kNone) {
    CopyAnswer(layer, pass, shared->answered_in);
    FillAnswer(layer, pass.query_tokens, 0);  // rows that pad a batch
    if (!IsLast(layer, pass)) return;
  } else {
    FillAnswer(layer, 0, kNan);
  }
  Barrier();
  if (Thread() == 0) EndLayer(layer, pass, failure, shared->answered_in);
}

// One thread.
ATTND_DEVICE void RunBegin(const Begin& begin) {
  Pass* const words = &At<PassWords>(begin.words)->pass;
  Control* const control = At<Control>(begin.control);
  // The stream has come to this pass with layers of the one before missing.
  if (words->open && words->failure == kNone) {
    control->ends[words->end].failure = kOrder;
    control->ends[words->end].failed_layer = words->next_layer;
  }
  words->open = 1;
  words->first_epoch = begin.first_epoch;
  words->layers = begin.layers;
  words->next_layer = 0;
  words->query_tokens = begin.query_tokens;
  words->new_tokens = begin.new_tokens;
  words->failure = kNone;
  words->want_lse = begin.want_lse;
  words->end = begin.end;
  words->in_twin = begin.in_twin;
  control->ends[begin.end] = {};
}

}  // namespace

#if defined(__CUDACC__)
extern "C" __global__ void __launch_bounds__(1024) attnd_layer(const Layer layer) {
  __shared__ Shared shared;
  RunLayer(layer, &shared);
}

extern "C" __global__ void attnd_begin(const Begin begin) {
  if (Thread() == 0 && Block() == 0) RunBegin(begin);
}
#endif
