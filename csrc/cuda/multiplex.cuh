// The routing weights of a tile of columns, shared by multiplex.cu and the fused MFNNR kernel.
//
// A column is one (batch row, output) pair; columns are numbered c = b*N + n, so the output of column c is the
// contiguous range [c*D, (c+1)*D). A block of kColumnThreads threads takes up to kColumns neighbouring columns,
// whichever batch rows they belong to, and walks through M in chunks: any M, N and D fit a fixed amount of shared
// memory.
#pragma once

#include <cmath>

#include "mixed.cuh"

namespace fastmod::cuda {

constexpr int kColumns = 32;
constexpr int kChunk = 32;  // rows of M in shared memory at a time
constexpr int kColumnThreads = 128;
static_assert(kColumnThreads % kColumns == 0, "a thread keeps its column while it walks the rows");

// Each copy has its own blocks on grid.y, which is limited to this many.
constexpr int64_t kCopiesAtOnce = 65535;
// Calls launch(first, count) for all copies, in groups of at most kCopiesAtOnce.
template <typename Launch>
cudaError_t by_copies(int64_t copies, Launch launch) {
  cudaError_t error = cudaSuccess;
  for (int64_t first = 0; first < copies && error == cudaSuccess; first += kCopiesAtOnce) {
    const int64_t left = copies - first;
    error = launch(first, static_cast<unsigned>(left < kCopiesAtOnce ? left : kCopiesAtOnce));
  }
  return error;
}
template <typename C>
__host__ __device__ Routing<C> routing_of(Routing<C> routing, int64_t copy) {
  if (routing.tau) routing.tau = number_after(routing.tau, routing.tau_type, copy * routing.tau_step);
  if (routing.seed) routing.seed += copy * routing.seed_step;
  return routing;
}

template <typename C>
__device__ inline C temperature_of(const Routing<C>& routing) {
  const C tau = routing.tau ? number_at(routing.tau, routing.tau_type) : routing.tau_value;
  return tau > C(0) ? tau : C(NAN);  // an invalid temperature on the device gives NaN
}
template <typename C>
__device__ inline int64_t seed_of(const Routing<C>& routing) {
  return routing.seed ? *routing.seed : routing.seed_value;
}

template <typename T, bool kMixed>
struct ColumnTile {
  using C = Compute<T>;

  Operand<kMixed, const T> logits;
  Shape shape;
  int mode;
  C tau;
  int64_t seed;
  int count;         // columns of this tile
  int column;        // this thread's column in the tile
  int64_t offset;    // of (b, 0, n) in logits; row m is offset + m*N
  C* scores;         // shared [kChunk][kColumns]
  C* top;            // shared [kColumns], the maximum of each column
  C* sum;            // shared [kColumns], of exp(score - top)
  int64_t* chosen;   // shared [kColumns], first row with the maximum

  __device__ ColumnTile(Operand<kMixed, const T> logits_, const Routing<C>& routing, const Shape& shape_,
                        int64_t first, int64_t end, C* scores_, C* top_, C* sum_, int64_t* chosen_)
      : logits(logits_), shape(shape_), mode(routing.mode), scores(scores_), top(top_), sum(sum_), chosen(chosen_) {
    tau = temperature_of(routing);
    seed = seed_of(routing);
    count = static_cast<int>(end - first < kColumns ? end - first : kColumns);
    column = threadIdx.x % kColumns;
    const int64_t c = first + (column < count ? column : 0);
    const int64_t b = quotient(c, shape.n);
    offset = b * shape.m * shape.n + (c - b * shape.n);
  }

  __device__ bool one_chunk() const { return shape.m <= kChunk; }
  __device__ int rows(int64_t m0) const {
    return static_cast<int>(shape.m - m0 < kChunk ? shape.m - m0 : kChunk);
  }
  __device__ static int first_row() { return threadIdx.x / kColumns; }
  static constexpr int kRowStep = kColumnThreads / kColumns;

  // scores = (logits + noise) / tau for rows m0 .. m0 + rows; guarded by barriers on both sides.
  __device__ void load(int64_t m0) {
    __syncthreads();
    if (column < count) {
      for (int m = first_row(); m < rows(m0); m += kRowStep) {
        const int64_t i = offset + (m0 + m) * shape.n;
        C value = value_at(logits, i);
        if (mode == kGumbel) value += gumbel_at<C>(seed, i);
        scores[m * kColumns + column] = value / tau;
      }
    }
    __syncthreads();
  }

  // top, sum and chosen of every column. One chunk: its scores stay in shared memory.
  __device__ void reduce() {
    const bool leads = static_cast<int>(threadIdx.x) < count;
    C best = -C(INFINITY), total = 0;
    int64_t at = 0;
    for (int64_t m0 = 0; m0 < shape.m; m0 += kChunk) {
      load(m0);
      for (int m = 0; leads && m < rows(m0); ++m) {
        const C value = scores[m * kColumns + column];
        if (value > best || value != value) {  // a NaN stays the maximum, as in torch
          best = value;
          at = m0 + m;
        }
      }
    }
    for (int64_t m0 = 0; m0 < shape.m; m0 += kChunk) {
      if (!one_chunk()) load(m0);
      for (int m = 0; leads && m < rows(m0); ++m) total += exponential(scores[m * kColumns + column] - best);
    }
    if (leads) {
      top[column] = best;
      sum[column] = total;
      chosen[column] = at;
    }
    __syncthreads();
  }

  __device__ C soft(C score) const { return exponential(score - top[column]) / sum[column]; }
  // One-hot, or NaN throughout where the softmax would be: top - top is NaN for a NaN or an infinity.
  __device__ C hard(int64_t m) const { return (m == chosen[column] ? C(1) : C(0)) + (top[column] - top[column]); }
  __device__ C forward_weight(int64_t m, C score) const { return mode == kSoftmax ? soft(score) : hard(m); }
};

// In four sums, as rounding errors accumulate with the length of a sum.
template <typename T>
__device__ inline Compute<T> dot(const T* a, const T* b, int64_t count) {
  Compute<T> sums[4] = {0, 0, 0, 0};
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[j] += widen(a[i + j]) * widen(b[i + j]);
  }
  for (; i < count; ++i) sums[0] += widen(a[i]) * widen(b[i]);
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// out[c, :] = sum over m of weight[m, c] * blocks[b, m, :] for the columns first .. min(first + kColumns, end).
template <bool kMixed, typename T>
__device__ void multiplex_columns(Operand<kMixed, const T> blocks, Operand<kMixed, const T> logits, T* out,
                                  const Routing<Compute<T>>& routing, const Shape& shape, int64_t first,
                                  int64_t end) {
  using C = Compute<T>;
  FASTMOD_SHARED(C, scores, kChunk * kColumns);
  FASTMOD_SHARED(C, top, kColumns);
  FASTMOD_SHARED(C, sum, kColumns);
  FASTMOD_SHARED(int64_t, chosen, kColumns);
  ColumnTile<T, kMixed> tile(logits, routing, shape, first, end, scores, top, sum, chosen);
  tile.reduce();

  const int64_t elements = tile.count * shape.d;
  for (int64_t e0 = 0; e0 < elements; e0 += kColumnThreads) {
    const int64_t e = e0 + threadIdx.x;
    const int column = static_cast<int>(quotient(e, shape.d));
    const int64_t b = quotient(first + column, shape.n);
    const auto block = blocks + (b * shape.m * shape.d + (e - column * shape.d));
    C total = 0;
    for (int64_t m0 = 0; m0 < shape.m; m0 += kChunk) {
      if (!tile.one_chunk()) tile.load(m0);
      if (!tile.one_chunk() || e0 == 0) {  // scores -> weights, in place
        if (tile.column < tile.count) {
          for (int m = tile.first_row(); m < tile.rows(m0); m += tile.kRowStep) {
            C& score = scores[m * kColumns + tile.column];
            score = tile.forward_weight(m0 + m, score);
          }
        }
        __syncthreads();
      }
      if (e < elements) {
        for (int m = 0; m < tile.rows(m0); ++m) {
          total += scores[m * kColumns + column] * value_at(block, (m0 + m) * shape.d);
        }
      }
    }
    if (e < elements) narrow(total, out + first * shape.d + e);
  }
}

}  // namespace fastmod::cuda
