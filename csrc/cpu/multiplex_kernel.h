// Routing of blocks on one batch-last tile.
#pragma once

#include "cpu/kernels.h"

namespace fastmod::cpu {

template <typename T>
struct MultiplexArgs {
  BlockSizes size;
  Routing routing;
  const T* blocks;  // [B, M, D]
  const T* logits;  // [B, M, N]
  const T* grad;    // [B, N, D], backward only
  T* out;           // [B, N, D], forward only
  T* grad_blocks;   // [B, M, D]
  T* grad_logits;   // [B, M, N]
  bool need_tau;
};

template <typename T>
struct MultiplexKernels {
  // The caller owns the scratch: 64-byte aligned, of the size that the matching function returns.
  int64_t (*scratch)(const BlockSizes&);
  void (*forward)(const MultiplexArgs<T>&, int64_t begin, int64_t end, T* scratch);
  double (*backward)(const MultiplexArgs<T>&, int64_t begin, int64_t end, T* scratch);  // gradient of tau
};

}  // namespace fastmod::cpu

#ifdef FASTMOD_ISA

#include "cpu/gemm.h"

namespace fastmod::cpu::FASTMOD_ISA {

// One small product per batch element, for a vector of elements at a time:
// C(r, c) (+)= sum_k A(r, k) B(k, c), where every entry is a vector at data + r * row_stride + c * column_stride.
template <typename T>
struct Lanes {
  T* data;
  int64_t row_stride, column_stride;
  T* at(int64_t r, int64_t c) const { return data + r * row_stride + c * column_stride; }
};

template <typename T, int kRows, int kColumns>
FASTMOD_INLINE void lane_block(int64_t depth, Lanes<const T> a, Lanes<const T> b, Lanes<T> c, bool accumulate) {
  Vec<T> sum[kRows][kColumns];
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kColumns; ++j) sum[i][j] = accumulate ? load(c.at(i, j)) : Vec<T>{};
  for (int64_t k = 0; k < depth; ++k) {
    Vec<T> right[kColumns];
#pragma GCC unroll 4
    for (int j = 0; j < kColumns; ++j) right[j] = load(b.at(k, j));
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const Vec<T> left = load(a.at(i, k));
#pragma GCC unroll 4
      for (int j = 0; j < kColumns; ++j) sum[i][j] += left * right[j];
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kColumns; ++j) store(c.at(i, j), sum[i][j]);
}

template <typename T, int kRows>
void lane_rows(int64_t columns, int64_t depth, Lanes<const T> a, Lanes<const T> b, Lanes<T> c, bool accumulate) {
  int64_t j = 0;
  for (; j + 4 <= columns; j += 4) {
    lane_block<T, kRows, 4>(depth, a, b, c, accumulate);
    b.data += 4 * b.column_stride;
    c.data += 4 * c.column_stride;
  }
  for (; j < columns; ++j) {
    lane_block<T, kRows, 1>(depth, a, b, c, accumulate);
    b.data += b.column_stride;
    c.data += c.column_stride;
  }
}

template <typename T>
void lane_gemm(int64_t rows, int64_t columns, int64_t depth, Lanes<const T> a, Lanes<const T> b, Lanes<T> c,
               bool accumulate) {
  constexpr int kRows = FASTMOD_VECTOR_BYTES == 64 ? 4 : 2;  // as many sums as the registers hold
  int64_t i = 0;
  for (; i + kRows <= rows; i += kRows) {
    lane_rows<T, kRows>(columns, depth, a, b, c, accumulate);
    a.data += kRows * a.row_stride;
    c.data += kRows * c.row_stride;
  }
  for (; i < rows; ++i) {
    lane_rows<T, 1>(columns, depth, a, b, c, accumulate);
    a.data += a.row_stride;
    c.data += c.row_stride;
  }
}

inline int64_t vectors_for(int64_t count, int lanes) { return (count + lanes - 1) / lanes; }

// Noise for `count` consecutive logits starting at index `start`: word i % 4 of group i / 4.
template <typename T>
void uniforms(int64_t seed, uint64_t start, int64_t count, T* target, int64_t stride) {
  PhiloxWords words{};
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t element = start + i;
    if (i == 0 || element % 4 == 0) words = philox_group(seed, element / 4, kStreamMultiplex);
    target[i * stride] = uniform_from_word<T>(words.word[element % 4]);
  }
}

template <typename T>
FASTMOD_INLINE Vec<T> add_gumbel(Vec<T> value, Vec<T> uniform) {
  return value - vlog(-vlog(uniform));
}

// Softmax over m entries at distance `step`, a vector at a time; `hard` gets the weights of a straight-through forward.
template <bool pick, typename T>
FASTMOD_INLINE void softmax_column(int64_t m, int64_t step, const T* z, T* soft, T* hard) {
  Vec<T> top = load(z), other = top, where{};
  int64_t next = 1;
  if (!pick)
    for (; next + 1 < m; next += 2) {  // two at a time: they are independent
      top = maximum<T>(top, load(z + next * step));
      other = maximum<T>(other, load(z + (next + 1) * step));
    }
  for (; next < m; ++next) {
    const Vec<T> value = load(z + next * step);
    if (pick) where = value > top ? splat(T(next)) : where;
    top = maximum<T>(top, value);
  }
  if (!pick) top = maximum<T>(top, other);
  Vec<T> sum{};
  for (int64_t i = 0; i < m; ++i) {
    const Vec<T> e = vexp<true>(load(z + i * step) - top);
    store(soft + i * step, e);
    sum += e;
  }
  const Vec<T> scale = T(1) / sum;
  for (int64_t i = 0; i < m; ++i) {
    const Vec<T> w = load(soft + i * step) * scale;
    store(soft + i * step, w);
    // w - w is 0, or NaN where the softmax is NaN, so that a NaN never becomes a confident pick.
    if (pick) store(hard + i * step, (where == T(i) ? splat(T(1)) : Vec<T>{}) + (w - w));
  }
}

// Turns the gradient of the weights into that of the logits, in place, and returns that of tau, lane by lane. The
// gradients of a column sum to 0, so any offset may be subtracted from z; subtracting its mean keeps the rounding error
// of `mean` out of the result.
template <typename T>
FASTMOD_INLINE Vec<T> softmax_column_backward(int64_t m, int64_t step, T inverse_tau, bool need_tau, const T* z,
                                              const T* soft, T* grad) {
  Vec<T> mean{}, centre{}, along_tau{};
  for (int64_t i = 0; i < m; ++i) mean += load(soft + i * step) * load(grad + i * step);
  if (need_tau)
    for (int64_t i = 0; i < m; ++i) centre += load(soft + i * step) * load(z + i * step);
  for (int64_t i = 0; i < m; ++i) {
    const Vec<T> g = load(soft + i * step) * (load(grad + i * step) - mean) * inverse_tau;
    if (need_tau) along_tau -= g * (load(z + i * step) - centre);
    store(grad + i * step, g);
  }
  return along_tau;
}

template <typename T>
FASTMOD_INLINE double sum_first(Vec<T> v, int64_t count) {
  double total = 0;
  for (int64_t i = 0; i < std::min<int64_t>(kLanes<T>, count); ++i) total += double(v[i]);
  return total;
}

// The logits with noise and temperature, their softmax, and the weights that the forward uses.
template <typename T>
struct Weights {
  const T *z, *soft, *used;
};

// ---- on a batch-last tile of kWidth elements: a vector holds one logit of many elements

// Scratch of the routing of one tile, all [M*N, kWidth].
template <typename T, int kWidth>
struct RoutingScratch {
  T *z, *soft, *hard;
  static int64_t size(const BlockSizes& s) { return 3 * s.m * s.n * kWidth; }
  RoutingScratch(const BlockSizes& s, T* scratch)
      : z(scratch), soft(scratch + s.m * s.n * kWidth), hard(scratch + 2 * s.m * s.n * kWidth) {}
};

template <int kWidth, typename T>
Weights<T> route_weights(const BlockSizes& s, const Routing& routing, int64_t first, int64_t count, const T* logits,
                         const RoutingScratch<T, kWidth>& scratch) {
  const bool pick = routing.mode != Mode::kSoftmax, gumbel = routing.mode == Mode::kGumbel;
  const int64_t entries = s.m * s.n;
  if (gumbel) {  // `soft` holds the noise until the weights overwrite it
    std::fill(scratch.soft, scratch.soft + entries * kWidth, T(0.5));
    for (int64_t column = 0; column < count; ++column)
      uniforms(routing.seed, uint64_t(first + column) * uint64_t(entries), entries, scratch.soft + column, kWidth);
  }
  const T inverse_tau = T(1) / T(routing.tau);
  const bool as_they_are = !gumbel && inverse_tau == T(1);
  const T* z = as_they_are ? logits : scratch.z;
  for (int64_t i = 0; i < entries && !as_they_are; ++i)
    for (int64_t at = i * kWidth; at < i * kWidth + count; at += kLanes<T>) {
      const Vec<T> value = load(logits + at);
      store(scratch.z + at, (gumbel ? add_gumbel<T>(value, load(scratch.soft + at)) : value) * inverse_tau);
    }
  for (int64_t at = 0; at < count; at += kLanes<T>)
    for (int64_t e = at; e < s.n * kWidth + at; e += kWidth)
      if (pick) softmax_column<true>(s.m, s.n * kWidth, z + e, scratch.soft + e, scratch.hard + e);
      else softmax_column<false>(s.m, s.n * kWidth, z + e, scratch.soft + e, scratch.hard + e);
  return {z, scratch.soft, pick ? scratch.hard : scratch.soft};
}

// routed [N*D] from blocks [M*D] and weights [M*N]; all are tiles
template <int kWidth, typename T>
void multiplex_tile(const BlockSizes& s, int64_t count, const T* blocks, const Weights<T>& weights, T* routed) {
  for (int64_t at = 0; at < count; at += kLanes<T>)
    lane_gemm<T>(s.n, s.d, s.m, {weights.used + at, kWidth, s.n * kWidth}, {blocks + at, s.d * kWidth, kWidth},
                 {routed + at, s.d * kWidth, kWidth}, false);
}

// Backward from the gradient of routed: writes grad_logits, writes or adds to grad_blocks (may be null), returns the
// gradient of tau.
template <int kWidth, typename T>
double multiplex_tile_backward(const BlockSizes& s, const Routing& routing, int64_t count, const T* blocks,
                               const T* grad_routed, const Weights<T>& weights, T* grad_logits,
                               T* grad_blocks, bool accumulate, bool need_tau) {
  const T inverse_tau = T(1) / T(routing.tau);
  double grad_tau = 0;
  for (int64_t at = 0; at < count; at += kLanes<T>) {
    lane_gemm<T>(s.m, s.n, s.d, {blocks + at, s.d * kWidth, kWidth}, {grad_routed + at, kWidth, s.d * kWidth},
                 {grad_logits + at, s.n * kWidth, kWidth}, false);
    if (grad_blocks)
      lane_gemm<T>(s.m, s.d, s.n, {weights.used + at, s.n * kWidth, kWidth}, {grad_routed + at, s.d * kWidth, kWidth},
                   {grad_blocks + at, s.d * kWidth, kWidth}, accumulate);
    for (int64_t e = at; e < s.n * kWidth + at; e += kWidth) {
      const Vec<T> along_tau = softmax_column_backward(s.m, s.n * kWidth, inverse_tau, need_tau, weights.z + e,
                                                       weights.soft + e, grad_logits + e);
      if (need_tau) grad_tau += sum_first<T>(along_tau, count - at);
    }
  }
  return grad_tau;
}

// ---- the op by itself, large blocks: one batch element after the other, in its layout in memory

// Rows of logits padded to whole vectors.
template <typename T>
int64_t padded(int64_t n) {
  return (n + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
}

// z, soft, hard and grad [M, N padded], gradient transposed [D, N padded], noise
template <typename T>
struct ElementScratch {
  int64_t width;
  T *z, *soft, *hard, *grad, *transposed, *noise;
  static int64_t size(const BlockSizes& s) { return (4 * s.m + s.d) * padded<T>(s.n) + s.m * s.n + kLanes<T>; }
  ElementScratch(const BlockSizes& s, T* memory) : width(padded<T>(s.n)) {
    z = memory;
    soft = z + s.m * width;
    hard = soft + s.m * width;
    grad = hard + s.m * width;
    transposed = grad + s.m * width;
    noise = transposed + s.d * width;
  }
};

// Weights [M, N padded] of one batch element.
template <typename T>
FASTMOD_INLINE Weights<T> element_weights(const MultiplexArgs<T>& args, int64_t element,
                                          const ElementScratch<T>& scratch) {
  constexpr int lanes = kLanes<T>;
  const BlockSizes& s = args.size;
  const bool pick = args.routing.mode != Mode::kSoftmax, gumbel = args.routing.mode == Mode::kGumbel;
  const T* logits = args.logits + element * s.m * s.n;
  const T inverse_tau = T(1) / T(args.routing.tau);
  if (gumbel) uniforms(args.routing.seed, uint64_t(element) * uint64_t(s.m * s.n), s.m * s.n, scratch.noise, 1);
  const bool as_they_are = !gumbel && inverse_tau == T(1) && s.n == scratch.width;
  const T* z = as_they_are ? logits : scratch.z;
  for (int64_t i = 0; i < s.m && !as_they_are; ++i)
    for (int64_t j = 0; j < s.n; j += lanes) {
      const int64_t count = std::min<int64_t>(lanes, s.n - j);
      Vec<T> value = load_first(logits + i * s.n + j, count);
      if (gumbel) {
        Vec<T> uniform = load_first(scratch.noise + i * s.n + j, count);
        value = add_gumbel<T>(value, uniform > T(0) ? uniform : splat(T(0.5)));  // 0.5 past the end keeps it finite
      }
      store(scratch.z + i * scratch.width + j, value * inverse_tau);
    }
  for (int64_t j = 0; j < s.n; j += lanes)
    if (pick) softmax_column<true>(s.m, scratch.width, z + j, scratch.soft + j, scratch.hard + j);
    else softmax_column<false>(s.m, scratch.width, z + j, scratch.soft + j, scratch.hard + j);
  return {z, scratch.soft, pick ? scratch.hard : scratch.soft};
}

// Prefetches what a product had too few steps for.
template <typename T>
FASTMOD_INLINE void fetch_rest(const PrefetchCursor<T>& cursor, const T* read_end, const T* write_end) {
  prefetch<0>(cursor.read, read_end - cursor.read);
  prefetch<1>(cursor.write, write_end - cursor.write);
}

template <typename T>
void elements_forward(const MultiplexArgs<T>& args, int64_t begin, int64_t end, T* memory) {
  const BlockSizes& s = args.size;
  const int64_t mn = s.m * s.n, md = s.m * s.d, nd = s.n * s.d;
  const ElementScratch<T> scratch(s, memory);
  for (int64_t element = begin; element < end; ++element) {
    const int64_t next = std::min(element + 1, end - 1);
    const Weights<T> weights = element_weights(args, element, scratch);
    prefetch<0>(args.logits + next * mn, mn);
    PrefetchCursor<T> cursor{args.blocks + next * md, args.out + next * nd};
    small_gemm<T>(s.n, s.d, s.m, {weights.used, 1, scratch.width}, args.blocks + element * md, s.d,
                  args.out + element * nd, s.d, &cursor);
    fetch_rest(cursor, args.blocks + (next + 1) * md, args.out + (next + 1) * nd);
  }
}

template <typename T>
double elements_backward(const MultiplexArgs<T>& args, int64_t begin, int64_t end, T* memory) {
  constexpr int lanes = kLanes<T>;
  const BlockSizes& s = args.size;
  const int64_t mn = s.m * s.n, md = s.m * s.d, nd = s.n * s.d;
  const ElementScratch<T> scratch(s, memory);
  const T inverse_tau = T(1) / T(args.routing.tau);
  // The gradients of the weights are M*N products of rows: lanes run along D if D is long, else along N.
  const bool by_dots = s.d >= 4 * lanes && s.d > 4 * s.n;
  std::fill(scratch.grad, scratch.grad + (s.m + s.d) * scratch.width, T(0));  // padding is read, never written
  double grad_tau = 0;
  for (int64_t element = begin; element < end; ++element) {
    const int64_t next = std::min(element + 1, end - 1);
    const T *blocks = args.blocks + element * md, *grad = args.grad + element * nd;
    const Weights<T> weights = element_weights(args, element, scratch);
    PrefetchCursor<T> cursor{args.grad + next * nd, args.grad_blocks + next * md};
    small_gemm<T>(s.m, s.d, s.n, {weights.used, scratch.width, 1}, grad, s.d, args.grad_blocks + element * md, s.d,
                  &cursor);
    fetch_rest(cursor, args.grad + (next + 1) * nd, args.grad_blocks + (next + 1) * md);
    cursor = {args.blocks + next * md, args.grad_logits + next * mn};
    if (by_dots) {
      dots<T>(s.m, s.n, s.d, blocks, s.d, grad, s.d, scratch.grad, scratch.width);
    } else {
      transpose(grad, s.d, s.n, s.d, scratch.transposed, scratch.width);
      small_gemm<T>(s.m, scratch.width, s.d, {blocks, s.d, 1}, scratch.transposed, scratch.width, scratch.grad,
                    scratch.width, &cursor);
    }
    fetch_rest(cursor, args.blocks + (next + 1) * md, args.grad_logits + (next + 1) * mn);
    for (int64_t j = 0; j < s.n; j += lanes) {
      const Vec<T> along_tau = softmax_column_backward(s.m, scratch.width, inverse_tau, args.need_tau, weights.z + j,
                                                       weights.soft + j, scratch.grad + j);
      if (args.need_tau) grad_tau += sum_first<T>(along_tau, s.n - j);
      for (int64_t i = 0; i < s.m; ++i)
        store_first(args.grad_logits + element * mn + i * s.n + j, load(scratch.grad + i * scratch.width + j),
                    std::min<int64_t>(lanes, s.n - j));
    }
    prefetch<0>(args.logits + next * mn, mn);
  }
  return grad_tau;
}

// ---- the op by itself, small blocks: tiles of one vector, small enough for the first-level cache

template <typename T>
struct NarrowTile {
  static constexpr int width = kLanes<T>;
  RoutingScratch<T, width> routing;
  T *logits, *grad_logits, *blocks, *grad_blocks, *routed;
  static int64_t size(const BlockSizes& s) {
    return RoutingScratch<T, width>::size(s) + (2 * s.m * s.n + 2 * s.m * s.d + s.n * s.d) * width;
  }
  static bool fits(const BlockSizes& s) { return size(s) * int64_t(sizeof(T)) <= 48 * 1024; }
  NarrowTile(const BlockSizes& s, T* memory) : routing(s, memory) {
    logits = memory + RoutingScratch<T, width>::size(s);
    grad_logits = logits + s.m * s.n * width;
    blocks = grad_logits + s.m * s.n * width;
    grad_blocks = blocks + s.m * s.d * width;
    routed = grad_blocks + s.m * s.d * width;
  }
  // Loads the inputs of `count` elements.
  Weights<T> load(const MultiplexArgs<T>& args, int64_t first, int64_t count) const {
    const BlockSizes& s = args.size;
    into_tile<width>(args.logits + first * s.m * s.n, count, s.m * s.n, logits);
    into_tile<width>(args.blocks + first * s.m * s.d, count, s.m * s.d, blocks);
    return route_weights<width>(s, args.routing, first, count, static_cast<const T*>(logits), routing);
  }
};

template <typename T>
int64_t multiplex_scratch(const BlockSizes& s) {
  return NarrowTile<T>::fits(s) ? NarrowTile<T>::size(s) : ElementScratch<T>::size(s);
}

template <typename T>
void multiplex_forward(const MultiplexArgs<T>& args, int64_t begin, int64_t end, T* memory) {
  const BlockSizes& s = args.size;
  if (!NarrowTile<T>::fits(s)) return elements_forward(args, begin, end, memory);
  constexpr int width = NarrowTile<T>::width;
  const NarrowTile<T> tile(s, memory);
  for (int64_t first = begin; first < end; first += width) {
    const int64_t count = std::min<int64_t>(width, end - first);
    const Weights<T> weights = tile.load(args, first, count);
    multiplex_tile<width>(s, count, static_cast<const T*>(tile.blocks), weights, tile.routed);
    from_tile<width>(tile.routed, count, s.n * s.d, args.out + first * s.n * s.d);
  }
}

template <typename T>
double multiplex_backward(const MultiplexArgs<T>& args, int64_t begin, int64_t end, T* memory) {
  const BlockSizes& s = args.size;
  if (!NarrowTile<T>::fits(s)) return elements_backward(args, begin, end, memory);
  constexpr int width = NarrowTile<T>::width;
  const NarrowTile<T> tile(s, memory);
  double grad_tau = 0;
  for (int64_t first = begin; first < end; first += width) {
    const int64_t count = std::min<int64_t>(width, end - first);
    into_tile<width>(args.grad + first * s.n * s.d, count, s.n * s.d, tile.routed);
    const Weights<T> weights = tile.load(args, first, count);
    grad_tau += multiplex_tile_backward<width>(s, args.routing, count, static_cast<const T*>(tile.blocks),
                                               static_cast<const T*>(tile.routed), weights,
                                               tile.grad_logits, tile.grad_blocks, false, args.need_tau);
    from_tile<width>(tile.grad_logits, count, s.m * s.n, args.grad_logits + first * s.m * s.n);
    from_tile<width>(tile.grad_blocks, count, s.m * s.d, args.grad_blocks + first * s.m * s.d);
  }
  return grad_tau;
}

FASTMOD_KERNELS(MultiplexKernels, .scratch = multiplex_scratch<T>, .forward = multiplex_forward<T>,
                .backward = multiplex_backward<T>);

}  // namespace fastmod::cpu::FASTMOD_ISA

#else

#include "checks.h"

namespace fastmod {

// Returns the number of copies, or 0 without such a dimension. With copies, temperature and seed (if given) have one
// number per copy, and all other tensors have the copies as their first dimension.
inline int64_t check_multiplex(const at::Tensor& blocks, const at::Tensor& logits,
                               const std::optional<at::Tensor>& tau, const std::optional<at::Tensor>& seed,
                               const LowType& low) {
  check_float(blocks, "blocks");
  check_mixed(blocks, logits, low, "logits");
  TORCH_CHECK_VALUE(blocks.dim() >= 2 && logits.dim() == blocks.dim() && blocks.size(-2) > 0 &&
                        blocks.sizes().slice(0, blocks.dim() - 1) == logits.sizes().slice(0, logits.dim() - 1),
                    "expected blocks [..., M, D] and logits [..., M, N], got ", blocks.sizes(), " and ",
                    logits.sizes());
  const auto& numbers = seed ? seed : tau;
  if (!numbers || numbers->dim() != 1) return 0;
  TORCH_CHECK_VALUE(numbers->size(0) > 0 && blocks.dim() > 2 && blocks.size(0) == numbers->size(0),
                    "expected blocks and logits of ", numbers->size(0), " copies, got ", blocks.sizes(), " and ",
                    logits.sizes());
  return numbers->size(0);
}

}  // namespace fastmod

#endif
