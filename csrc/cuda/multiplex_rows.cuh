// Whole batch rows of multiplex, for multiplex.cu and multiplex_backward.cu.
//
// A block needs a few batch rows of each tensor, which are contiguous in memory: they are loaded into shared memory 16
// bytes at a time, however short a row is. There scores become weights once, and threads then multiply tiles of both in
// registers. Weights and everything shaped like them are [row][m][pitch], with pitch at least n and rows `stride`
// apart. The passes over them take an Index type: int in shared memory, int64_t if they are too large for it and stay
// in global memory.
#pragma once

#include "multiplex.cuh"
#include "rows.cuh"

namespace fastmod::cuda {

constexpr int kRowThreads = 128;  // at most
constexpr int kLine = 128;        // bytes

// Neighbours that are moved at once: at most 16 bytes.
template <int kCount, typename T>
struct alignas(kCount * sizeof(T) < 16 ? kCount * sizeof(T) : 16) Pack {
  T v[kCount];
};
template <int kCount, typename T>
__device__ inline Pack<kCount, T> read_pack(const T* from) {
  return *reinterpret_cast<const Pack<kCount, T>*>(from);
}
template <int kCount, typename T>
__device__ inline void write_pack(const Pack<kCount, T>& pack, T* to) {
  *reinterpret_cast<Pack<kCount, T>*>(to) = pack;
}
template <int kCount, typename T>
bool packs(const T* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % alignof(Pack<kCount, T>) == 0;
}

template <int kCount, typename T>
bool packs(const Mixed<T>& tensor) {
  return tensor.wide ? packs<kCount>(tensor.wide) : packs<kCount>(tensor.narrow);
}

// How many outputs a thread keeps sums for, if it reads `vector` elements at once along d.
__host__ __device__ constexpr int tile_of(int vector) { return vector == 4 ? 4 : 8; }

inline int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }
template <typename T>
int64_t span_bytes(int64_t count) {
  return round_up(count * static_cast<int64_t>(sizeof(T)), 16) + kLine;
}

// Copies `count` elements into `memory` asynchronously, at the same offset within a line as in global memory, so that
// no load of a warp touches more than four lines. Returns where the first will be. No alignment beyond that of an
// element is needed.
template <typename T>
__device__ inline const T* copy_span(const T* from, int count, unsigned char* memory) {
  constexpr int kEach = 16 / sizeof(T);
  const int head = static_cast<int>(reinterpret_cast<uintptr_t>(from) % kLine) / static_cast<int>(sizeof(T));
  T* to = reinterpret_cast<T*>(memory) + head;
  const int before = -head & (kEach - 1);  // elements before the first 16 bytes
  const int whole = count < before ? count : count - ((count - before) & (kEach - 1));
  const int step = static_cast<int>(blockDim.x) * kEach;
  int at = static_cast<int>(threadIdx.x) * kEach - head;
  const T* source = from + at;
  T* target = to + at;
  if (at >= before && at < whole) copy_async<16>(target, source, true);
#pragma unroll 1
  while ((at += step) < whole) copy_async<16>(target += step, source += step, true);
  const int edge = static_cast<int>(threadIdx.x), after = count - whole;
  if (edge < before && edge < count) to[edge] = from[edge];
  if (edge < after) to[whole + edge] = from[whole + edge];
  return to;
}

// The same for T rounded from fp32, which goes through registers; otherwise as if it had been cast before.
template <typename T>
__device__ inline const T* copy_span(const Mixed<const T>& tensor, int count, unsigned char* memory) {
  if (!tensor.wide) return copy_span(tensor.narrow, count, memory);
  const float* from = tensor.wide;
  const int head = static_cast<int>(reinterpret_cast<uintptr_t>(from) % kLine) / static_cast<int>(sizeof(float));
  T* to = reinterpret_cast<T*>(memory) + head;
#pragma unroll 2
  for (int at = static_cast<int>(threadIdx.x) * 4 - head; at < count; at += static_cast<int>(blockDim.x) * 4) {
    if (at >= 0 && at + 4 <= count) {
      const auto wide = read_pack<4>(from + at);
      Pack<4, T> low;
#pragma unroll
      for (int j = 0; j < 4; ++j) narrow(wide.v[j], &low.v[j]);
      write_pack<4>(low, to + at);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (at + j >= 0 && at + j < count) narrow(from[at + j], to + at + j);
      }
    }
  }
  return to;
}

// Four neighbours in the compute dtype.
template <typename T>
__device__ inline Pack<4, Compute<T>> wide_four(const T* from) {
  const auto read = read_pack<4>(from);
  Pack<4, Compute<T>> four;
#pragma unroll
  for (int j = 0; j < 4; ++j) four.v[j] = widen(read.v[j]);
  return four;
}
template <typename T>
__device__ inline Pack<4, float> wide_four(const Mixed<const T>& from) {
  if (!from.wide) return wide_four(from.narrow);
  auto four = read_pack<4>(from.wide);
#pragma unroll
  for (int j = 0; j < 4; ++j) four.v[j] = rounded_to<T>(four.v[j]);
  return four;
}
template <int kCount, typename T>
__device__ inline void put_pack(const Compute<T> (&v)[kCount], T* to) {
  Pack<kCount, T> result;
#pragma unroll
  for (int k = 0; k < kCount; ++k) narrow(v[k], &result.v[k]);
  write_pack<kCount>(result, to);
}
template <int kCount, typename T>
__device__ inline void put_pack(const float (&v)[kCount], const Mixed<T>& to) {
  if (!to.wide) return put_pack(v, to.narrow);
  Pack<kCount, float> result;
#pragma unroll
  for (int k = 0; k < kCount; ++k) result.v[k] = v[k];
  write_pack<kCount>(result, to.wide);
}

template <typename Index>
__device__ inline Index quotient_of(Index a, Index b) {  // a / b for a, b >= 0
  if constexpr (sizeof(Index) == 4) {
    return static_cast<Index>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b));
  } else {
    return quotient(a, b);
  }
}

__device__ inline int round_to_warps(int count) { return (count + kWarp - 1) / kWarp * kWarp; }

// A walk over elements first .. first + count - 1 of [.., m, n] in fours, aligned like those of the noise:
// visit(index of the first of the four relative to `first`, whether all four exist). Loads begin at a line.
template <typename Index, typename Visit>
__device__ inline void by_fours(int64_t first, Index count, Visit visit) {
  const Index lead = static_cast<Index>(first % kWarp);
#pragma unroll 1
  for (Index at = static_cast<Index>(threadIdx.x) * 4 - lead; at < count; at += static_cast<Index>(blockDim.x) * 4) {
    if (at > -4) visit(at, at >= 0 && at + 4 <= count);
  }
}
// The layout of weights.
template <typename Index>
struct Places {
  Index m, n, pitch, stride;

  // Calls use(j, place) for those of four elements of [rows, m, n] that exist (are below `count`).
  template <typename Use>
  __device__ void each_of_four(Index at, Index count, Use use) const {
    Index line = at < 0 ? 0 : quotient_of(at, n), column = at - line * n;
    Index row = quotient_of(line, m), i = line - row * m;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (at + j >= 0 && at + j < count) use(j, row * stride + i * pitch + column);
      if (++column == n) {
        column = 0;
        if (++i == m) i = 0, ++row;
      }
    }
  }
  // Whether four elements starting at a multiple of four are neighbours in this layout as well.
  __device__ bool by_fours() const { return pitch == n && n % 4 == 0; }
  __device__ Index of_four(Index at) const { return at + quotient_of(at, m * n) * (stride - m * n); }
};

// The logits of a kernel that takes whole rows.
template <typename T, bool kMixed>
struct Logits {
  Operand<kMixed, const T> logits;
  bool vector;  // read in fours
  int64_t first;  // index of the block's first logit
  bool vector_grads = false;  // gradients written in fours

  template <typename Index>
  __device__ void read(Index at, bool whole, Index count, Pack<4, Compute<T>>& four) const {
    const auto from = logits + (first + at);
    if (whole && vector) {
      four = wide_four(from);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) four.v[j] = at + j >= 0 && at + j < count ? value_at(from, j) : Compute<T>(0);
    }
  }

  // scores = (logits + noise) / tau, with one Philox call for four.
  template <bool kNoise, typename Index>
  __device__ void load(Compute<T> tau, int64_t seed, Index count, const Places<Index>& places,
                       Compute<T>* scores) const {
    using C = Compute<T>;
    const PhiloxKeys keys(seed);
    const auto finish = [&](Index at, Pack<4, C>& four) {
      if constexpr (kNoise) {
        const auto index = static_cast<uint64_t>(first + at);
        const PhiloxWords words = philox_group(keys, index / 4, kStreamMultiplex);
#pragma unroll
        for (int j = 0; j < 4; ++j) four.v[j] += gumbel_of_word<C>(words.word[j]);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) four.v[j] = four.v[j] / tau;
    };
    Pack<4, C> four;
    if (vector && places.by_fours()) {
      const Index step = static_cast<Index>(blockDim.x) * 4;
      Index at = static_cast<Index>(threadIdx.x) * 4 - static_cast<Index>(first % kWarp);
      auto source = logits + (first + at);
      if (at < 0) at += step, source += step;
#pragma unroll 1
      for (; at < count; at += step, source += step) {
        four = wide_four(source);
        finish(at, four);
        write_pack<4>(four, scores + places.of_four(at));
      }
      return;
    }
    by_fours(first, count, [&](Index at, bool whole) {
      read(at, whole, count, four);
      finish(at, four);
      places.each_of_four(at, count, [&](int j, Index place) { scores[place] = four.v[j]; });
    });
  }
  template <typename Index>
  __device__ void load_scores(const Routing<Compute<T>>& routing, Compute<T> tau, Index count,
                              const Places<Index>& places, Compute<T>* scores) const {
    if (routing.mode == kGumbel) {
      load<true>(tau, seed_of(routing), count, places, scores);
    } else {
      load<false>(tau, 0, count, places, scores);
    }
  }
};

// How a launch distributes rows over blocks, and the layout of their shared memory. The number of blocks and of rows
// per block follows from sizes alone, the rest also from the alignment of pointers.
struct RowPlan {
  int rows, threads;  // per block
  int d;
  Places<int> places;
  bool vector_logits, vector_grads;
  bool fits;  // whether shared memory has room for one row

  // Rows are an odd number of 16 bytes apart (with 4-byte numbers), so that they use different banks.
  static int64_t stride_of(const Shape& shape, int64_t pitch) { return (shape.m * pitch / 4 | 1) * 4; }

  // bytes(rows, stride): shared memory. tiled: n or m, whichever a thread takes several of.
  template <typename Bytes>
  RowPlan(const Shape& shape, int64_t tiled, int64_t most_bytes, Bytes bytes) {
    constexpr int64_t kBlocks = 256;       // at least, before blocks get more rows
    constexpr int64_t kUsual = 24 * 1024;  // bytes per block, unless a row takes more
    constexpr int64_t kItems = 2;          // per thread, as some work is shared by items; more in a large batch
    const int vector = shape.d % 4 == 0 ? 4 : shape.d % 2 == 0 ? 2 : 1;
    const int64_t items = (tiled + tile_of(vector) - 1) / tile_of(vector) * (shape.d / vector);
    const auto room = [&](int64_t count) { return bytes(count, stride_of(shape, round_up(shape.n, 8))); };
    fits = items > 0 && shape.n > 0 && items < (1 << 24) && shape.m * shape.n < (1 << 24) && room(1) <= most_bytes;
    if (!fits) return;
    int64_t few = items < kItems * kWarp ? kItems * kWarp / items : 1;
    while (few > 1 && room(few) > kUsual) few /= 2;
    int64_t most = few;
    for (int64_t more = 2 * few; more <= 8 * few; more *= 2) {
      const bool busy = shape.batch >= kBlocks * more;
      if (busy && more * items <= 2 * kItems * kRowThreads && room(more) <= kUsual) most = more;
    }
    rows = static_cast<int>(most);
    const int64_t each = most > few ? 2 * kItems : kItems;
    const int64_t wanted = round_up((most * items + each - 1) / each, kWarp);
    threads = static_cast<int>(wanted < kRowThreads ? wanted : kRowThreads);
    d = static_cast<int>(shape.d);
  }
  // With several copies, those after the first are aligned only if each has a multiple of four logits.
  void align(const Shape& shape, int vector, bool logits, bool grads = false) {
    const bool apart = shape.copies == 1 || shape.batch * shape.m * shape.n % 4 == 0;
    const int64_t pitch = round_up(shape.n, tile_of(vector));
    places = {static_cast<int>(shape.m), static_cast<int>(shape.n), static_cast<int>(pitch),
              static_cast<int>(stride_of(shape, pitch))};
    vector_logits = logits && apart;
    vector_grads = grads && apart;
  }
};

// Calls visit(place of the first of kCount columns, first column) for all columns of `rows` batch rows.
template <int kCount, typename Index, typename Visit>
__device__ inline void each_column(Index rows, const Places<Index>& places, Visit visit) {
  const Index groups = quotient_of<Index>(places.n + kCount - 1, kCount);
#pragma unroll 1
  for (Index i = static_cast<Index>(threadIdx.x); i < rows * groups; i += static_cast<Index>(blockDim.x)) {
    const Index row = quotient_of(i, groups), column = (i - row * groups) * kCount;
    visit(row * places.stride + column, column);
  }
}

__device__ inline float larger(float a, float b) { return fmaxf(a, b); }
__device__ inline double larger(double a, double b) { return fmax(a, b); }

// Calls use(i) for i < count, four at a time and the rest without a loop.
template <typename Index, typename Use>
__device__ inline void in_order(Index count, Use use) {
  Index i = 0;
#pragma unroll 1
  for (; i + 4 <= count; i += 4) use(i), use(i + 1), use(i + 2), use(i + 3);
  if (count & 2) use(i), use(i + 1), i += 2;
  if (count & 1) use(i);
}

// Softmax over m, in place or not. A column with a NaN or +inf, or with only -inf, becomes NaN, as its sum is NaN.
template <int kCount, typename C, typename Index>
__device__ inline void soft_columns(const C* scores, C* weights, Index rows, const Places<Index>& places) {
  const Index m = places.m, pitch = places.pitch;
  each_column<kCount>(rows, places, [&](Index place, Index) {
    C best[kCount], sum[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k) best[k] = -C(INFINITY), sum[k] = C(0);
    const C* from = scores + place;
    C* to = weights + place;
    in_order(m, [&](Index i) {
      const auto score = read_pack<kCount>(from + i * pitch);
#pragma unroll
      for (int k = 0; k < kCount; ++k) best[k] = larger(best[k], score.v[k]);
    });
    in_order(m, [&](Index i) {
      auto score = read_pack<kCount>(from + i * pitch);
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        score.v[k] = exp_below(score.v[k] - best[k]);
        sum[k] += score.v[k];
      }
      write_pack<kCount>(score, to + i * pitch);
    });
#pragma unroll
    for (int k = 0; k < kCount; ++k) sum[k] = C(1) / sum[k];
    in_order(m, [&](Index i) {
      auto weight = read_pack<kCount>(to + i * pitch);
#pragma unroll
      for (int k = 0; k < kCount; ++k) weight.v[k] *= sum[k];
      write_pack<kCount>(weight, to + i * pitch);
    });
  });
}

// One column: one-hot at the first maximum, or all NaN if the softmax is NaN. In place or not.
template <typename C, typename Index>
__device__ inline void hard_column(const C* scores, C* weights, Index m, Index pitch) {
  C best = -C(INFINITY);
  Index chosen = 0;
  for (Index i = 0; i < m; ++i) {
    const C score = scores[i * pitch];
    if (score > best || score != score) {  // a NaN stays the maximum, as in torch
      best = score;
      chosen = i;
    }
  }
  for (Index i = 0; i < m; ++i) weights[i * pitch] = (i == chosen ? C(1) : C(0)) + (best - best);
}

}  // namespace fastmod::cuda
