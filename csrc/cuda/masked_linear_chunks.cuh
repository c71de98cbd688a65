// How the kernel of masked_linear.cu, which alone includes this, loads chunks of rows, weights and logits into shared
// memory and prepares them there.
#pragma once

#include "masked_linear.cuh"

namespace fastmod::cuda {
namespace {

constexpr int kDepth = 16;       // of a chunk
constexpr int kColumnTiles = 4;  // tiles of 8 columns per warp
constexpr int kColumns = 8 * kColumnTiles;
constexpr int kMaxWarps = 2;     // side by side
constexpr int kMaxSlabs = 2;     // per block
constexpr int kThreads = kWarp * kMaxWarps * kMaxSlabs;

template <typename T, bool kBackward, bool kMixed>
struct Problem {
  Operand<kMixed && !kBackward, const T> rows;  // [samples, rows, depth]
  Operand<kMixed, const T> weight, logits, biases;
  Operand<kMixed && kBackward, T> result;
  float* partials;  // [splits, samples * rows, width]
  unsigned* tickets;
  LinearShape shape;
  MaskNoise noise;
  Slabs slabs;
  int log_warps, slabs_each;  // of a block
  int64_t blocks, groups, splits, chunks_each;
  bool vector_rows, vector_weight, precise, near;
};

// Shared memory of a block, laid out for the largest block, so that all offsets are compile-time constants.
template <typename T>
struct Memory {
  using Unit = typename Four<T>::Unit;
  static constexpr int kParts = Four<T>::kParts, kRowQuads = kMaxSlabs * kSlabRows * kDepth / kQuad;
  static constexpr int kWeightQuads = kMaxWarps * kColumns * kDepth / kQuad;
  int64_t row[kMaxSlabs * kSlabRows];     // of the block, or -1
  const void* from[kMaxSlabs * kSlabRows];  // the start of each row
  alignas(16) T raw_rows[kRowQuads][kQuad];
  T raw_weight[kWeightQuads][kQuad], raw_logits[kWeightQuads][kQuad];
  Unit rows[kParts][kRowQuads];        // [row][t]
  Unit weights[kParts][kWeightQuads];  // see Block::slot_of
  uint4 low[kWeightQuads];             // low_word of each logit
  float4 logits[kWeightQuads];
  int odd;                             // whether a weight is NaN or infinite: 0 times it is not 0
};

// A thread's part in loading chunks into shared memory. Each thread prepares what it copied itself.
template <typename T, bool kBackward, bool kMixed>
struct Block {
  using Unit = typename Four<T>::Unit;
  static constexpr int kParts = Four<T>::kParts;
  static constexpr bool kMixedRows = kMixed && !kBackward;

  const Problem<T, kBackward, kMixed>& p;
  Memory<T>& memory;
  Operand<kMixed, const T> weight, logits;  // the thread's first quad of the next chunk to load
  int64_t column0, first_slab, k;
  int64_t weight_step, chunk_step;  // to the next quad, to the next chunk
  int64_t out, in;                  // of the first quad
  int first_slot, slot_step;        // of this thread's quads of weights
  int out_step, own_quads;
  int row_bytes, from_bytes;        // to the next row of the thread in shared memory

  // Where a quad of weights is in shared memory. Forward, it holds 4 k of one column, and `major` is the column;
  // backward, 4 columns of one k, and `major` is k % 4 and the quad of columns. Four lanes share it; t is k / 4.
  static __device__ int slot_of(int major, int t) { return major * 4 + t; }
  static constexpr int kAcross = kMaxWarps * kColumns / kQuad;  // quads of columns

  __device__ Block(const Problem<T, kBackward, kMixed>& p_, Memory<T>& memory_, int64_t copy, int64_t column0_,
                   int64_t first_slab_, int64_t first_chunk)
      : p(p_), memory(memory_), column0(column0_), first_slab(first_slab_), k(first_chunk * kDepth) {
    const int t = threadIdx.x % 4, own = threadIdx.x / 4;
    if constexpr (kBackward) {  // threads count columns first, then k
      const int across = 3 + p.log_warps, down = own >> across, quad = own & ((1 << across) - 1);
      first_slot = slot_of(down * kAcross + quad, t);
      out = k + 4 * t + down;
      in = column0 + quad * kQuad;
      out_step = p.slabs_each;
      slot_step = slot_of(p.slabs_each * kAcross, 0);
    } else {
      first_slot = slot_of(own, t);
      out = column0 + own;
      in = k + 4 * t;
      out_step = blockDim.x / 4;
      slot_step = blockDim.x;
    }
    const LinearCopies& copies = p.shape.copies;
    weight = p.weight + copy * copies.weight + out * p.shape.in + in;
    logits = p.logits + copy * copies.logits + out * p.shape.in + in;
    weight_step = held(out_step * p.shape.in);
    chunk_step = held(kBackward ? kDepth * p.shape.in : kDepth);
    own_quads = held(4 / p.slabs_each);
    row_bytes = held(static_cast<int>(blockDim.x * kQuad * sizeof(T)));
    from_bytes = held(static_cast<int>(blockDim.x / 4 * sizeof(const T*)));
    const auto rows = p.rows + copy * (kBackward ? copies.grad : copies.x);
    for (int i = threadIdx.x; i < p.slabs_each * kSlabRows; i += blockDim.x) {
      const int64_t row = p.slabs.row(first_slab + i / kSlabRows, i % kSlabRows);
      memory.row[i] = row;
      const auto first = rows + (row < 0 ? 0 : row * depth());  // for a missing row any row: its result is not stored
      if constexpr (kMixedRows) {
        memory.from[i] = first.wide ? static_cast<const void*>(first.wide) : first.narrow;
      } else {
        memory.from[i] = first;
      }
    }
    if (threadIdx.x == 0) memory.odd = 0;
  }
  __device__ int64_t depth() const { return kBackward ? p.shape.out : p.shape.in; }
  __device__ int64_t width() const { return kBackward ? p.shape.in : p.shape.out; }

  // Starts copying the next chunk.
  __device__ void load() {
    if (p.vector_rows) {
      load_rows<true>();
    } else {
      load_rows<false>();
    }
    if (p.vector_weight) {
      load_weights<true>();
    } else {
      load_weights<false>();
    }
    commit_copies();
    k += kDepth;
    (kBackward ? out : in) += kDepth;
    weight += chunk_step;
    logits += chunk_step;
  }
  template <bool kVector>
  __device__ void load_rows() const {
    const int64_t own = k + threadIdx.x % 4 * kQuad;
    const int inside = clamped(depth() - own);
    int64_t each = sizeof(T);
    if constexpr (kMixedRows) each = p.rows.wide ? sizeof(float) : sizeof(T);
    const int64_t ahead = inside > 0 ? own * each : 0;
    char* to = reinterpret_cast<char*>(&memory.raw_rows[threadIdx.x]);
    const char* from = reinterpret_cast<const char*>(&memory.from[threadIdx.x / 4]);
#pragma unroll 1
    for (int left = 2 >> p.log_warps; left > 0; --left) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const char* row = *reinterpret_cast<const char* const*>(from) + ahead;
        if constexpr (kMixedRows) {
          const bool wide = p.rows.wide != nullptr;
          const Mixed<const T> quad{wide ? nullptr : reinterpret_cast<const T*>(row),
                                    wide ? reinterpret_cast<const float*>(row) : nullptr};
          copy_quad<kVector>(reinterpret_cast<T*>(to), quad, inside);
        } else {
          copy_quad<kVector>(reinterpret_cast<T*>(to), reinterpret_cast<const T*>(row), inside);
        }
        to += row_bytes;
        from += from_bytes;
      }
    }
  }
  template <bool kVector>
  __device__ void load_weights() const {
    const int inside = clamped(p.shape.in - in);
    const int64_t most = p.shape.out - out;
    int left = most < 4 * kThreads ? static_cast<int>(most) : 4 * kThreads;  // at least as many as there are
    auto from_weight = weight, from_logits = logits;
    int slot = first_slot;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i % 2 == 0 && i >= own_quads) break;
      const int valid = left > 0 ? inside : 0;
      // The address must be readable even if nothing is copied.
      copy_quad<kVector>(memory.raw_weight[slot], either(valid > 0, from_weight, p.weight), valid);
      copy_quad<kVector>(memory.raw_logits[slot], either(valid > 0, from_logits, p.logits), valid);
      from_weight += weight_step;
      from_logits += weight_step;
      left -= out_step;
      slot += slot_step;
    }
  }

  __device__ void prepare() const {
    unsigned quad = threadIdx.x;
#pragma unroll 1
    for (int left = 2 >> p.log_warps; left > 0; --left) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(T) == 4) {
          float v[4];
          read_quad(memory.raw_rows[quad], v);
          Unit unit[kParts];
          Four<T>::split(v, p.precise, unit);
#pragma unroll
          for (int part = 0; part < kParts; ++part) memory.rows[part][quad] = unit[part];
        } else {
          memory.rows[0][quad] = *reinterpret_cast<const Unit*>(memory.raw_rows[quad]);
        }
        quad += blockDim.x;
      }
    }
    int slot = first_slot;
#pragma unroll 1
    for (int n = own_quads; n > 0; n -= 2) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        prepare_weights(slot);
        slot += slot_step;
      }
    }
  }
  __device__ void prepare_weights(int slot) const {
    float w[4], l[4], share[4];
    uint32_t low[4];
    read_quad(memory.raw_weight[slot], w);
    read_quad(memory.raw_logits[slot], l);
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      share[i] = roughly_off(l[i]);
      low[i] = low_word(share[i]);
    }
    Unit unit[kParts];
    if (!Four<T>::split(w, share, p.precise, unit)) {
#pragma unroll
      for (int i = 0; i < kQuad; ++i) w[i] += share[i] * 0.0f;  // a NaN logit makes the weight NaN
      Four<T>::split(w, p.precise, unit);
      memory.odd = 1;
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) memory.weights[part][slot] = unit[part];
    memory.low[slot] = {low[0], low[1], low[2], low[3]};
    memory.logits[slot] = {l[0], l[1], l[2], l[3]};
  }
};

}  // namespace
}  // namespace fastmod::cuda
