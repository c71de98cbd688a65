// Routing of blocks on one batch-last tile. Included once per ISA by instantiate.h.

// One small product per batch element, a vector of elements at a time:
// C(r, c) (+)= sum_k A(r, k) B(k, c), every entry a vector at data + r * row_stride + c * column_stride.
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

// z = (logits + gumbel) / tau for a tile. Noise element b * M*N + i belongs to logit i of batch element b.
template <typename T>
void scaled_logits(const Routing& routing, int64_t first, int64_t count, int64_t logits_count, const T* logits, T* z,
                   T* noise) {
  constexpr int lanes = kLanes<T>;
  const T tau = T(routing.tau);
  const bool gumbel = routing.mode == Mode::kGumbel;
  if (gumbel) {
    for (int64_t column = 0; column < count; ++column) {
      const uint64_t start = uint64_t(first + column) * uint64_t(logits_count);
      PhiloxWords words{};
      for (int64_t i = 0; i < logits_count; ++i) {
        const uint64_t element = start + i;
        if (i == 0 || element % 4 == 0) words = philox_group(routing.seed, element / 4, kStreamMultiplex);
        noise[i * kTile + column] = uniform_from_word<T>(words.word[element % 4]);
      }
    }
    for (int64_t i = 0; i < logits_count; ++i)  // a harmless value for the columns past the batch
      std::fill(noise + i * kTile + count, noise + (i + 1) * kTile, T(0.5));
  }
  for (int64_t i = 0; i < logits_count; ++i)
    for (int64_t v = 0; v < vectors_for(count, lanes); ++v) {
      const int64_t at = i * kTile + v * lanes;
      Vec<T> value = load(logits + at);
      if (gumbel) value = value - vlog(-vlog(load(noise + at)));
      store(z + at, value / tau);
    }
}

// Softmax over M of z [M, N] for one vector of batch elements, rows kTile apart; `hard` gets the weights of the forward.
template <typename T>
FASTMOD_INLINE void softmax_columns(int64_t m, int64_t n, bool pick, const T* z, T* soft, T* hard) {
  for (int64_t j = 0; j < n; ++j) {
    const int64_t step = n * kTile;
    const T* column = z + j * kTile;
    Vec<T> top = load(column);
    Vec<T> where{};
    for (int64_t i = 1; i < m; ++i) {
      const Vec<T> value = load(column + i * step);
      where = value > top ? splat(T(i)) : where;
      top = maximum<T>(top, value);
    }
    Vec<T> sum{};
    for (int64_t i = 0; i < m; ++i) {
      const Vec<T> e = vexp(load(column + i * step) - top);
      store(soft + j * kTile + i * step, e);
      sum += e;
    }
    const Vec<T> scale = T(1) / sum;
    for (int64_t i = 0; i < m; ++i) {
      const Vec<T> w = load(soft + j * kTile + i * step) * scale;
      store(soft + j * kTile + i * step, w);
      // w - w is 0, or NaN where the softmax is NaN: a NaN never turns into a confident pick.
      if (pick) store(hard + j * kTile + i * step, (where == T(i) ? splat(T(1)) : Vec<T>{}) + (w - w));
    }
  }
}

// Scratch of the routing of one tile, all [M*N, kTile].
template <typename T>
struct RoutingScratch {
  T *z, *soft, *hard;
  static int64_t size(const BlockSizes& s) { return 3 * s.m * s.n * kTile; }
  RoutingScratch(const BlockSizes& s, T* scratch)
      : z(scratch), soft(scratch + s.m * s.n * kTile), hard(scratch + 2 * s.m * s.n * kTile) {}
};

// Weights of a tile; returns those that the forward uses.
template <typename T>
const T* route_weights(const BlockSizes& s, const Routing& routing, int64_t first, int64_t count, const T* logits,
                       const RoutingScratch<T>& scratch) {
  const bool pick = routing.mode != Mode::kSoftmax;
  scaled_logits(routing, first, count, s.m * s.n, logits, scratch.z, scratch.soft);
  for (int64_t v = 0; v < vectors_for(count, kLanes<T>); ++v) {
    const int64_t at = v * kLanes<T>;
    softmax_columns(s.m, s.n, pick, scratch.z + at, scratch.soft + at, scratch.hard + at);
  }
  return pick ? scratch.hard : scratch.soft;
}

// routed [N*D] from blocks [M*D] and weights [M*N], tiles all
template <typename T>
void multiplex_tile(const BlockSizes& s, int64_t count, const T* blocks, const T* weights, T* routed) {
  for (int64_t v = 0; v < vectors_for(count, kLanes<T>); ++v) {
    const int64_t at = v * kLanes<T>;
    lane_gemm<T>(s.n, s.d, s.m, {weights + at, kTile, s.n * kTile}, {blocks + at, s.d * kTile, kTile},
                 {routed + at, s.d * kTile, kTile}, false);
  }
}

// From the gradient of routed: writes grad_logits, writes or adds to grad_blocks (may be null); returns that of tau.
template <typename T>
double multiplex_tile_backward(const BlockSizes& s, const Routing& routing, int64_t count, const T* blocks,
                               const T* grad_routed, const T* weights, const RoutingScratch<T>& scratch,
                               T* grad_logits, T* grad_blocks, bool accumulate) {
  constexpr int lanes = kLanes<T>;
  const T scale = T(1) / T(routing.tau);
  double grad_tau = 0;
  for (int64_t v = 0; v < vectors_for(count, lanes); ++v) {
    const int64_t at = v * lanes;
    lane_gemm<T>(s.m, s.n, s.d, {blocks + at, s.d * kTile, kTile}, {grad_routed + at, kTile, s.d * kTile},
                 {grad_logits + at, s.n * kTile, kTile}, false);
    if (grad_blocks)
      lane_gemm<T>(s.m, s.d, s.n, {weights + at, s.n * kTile, kTile}, {grad_routed + at, s.d * kTile, kTile},
                   {grad_blocks + at, s.d * kTile, kTile}, accumulate);
    Vec<T> along_tau{};
    for (int64_t j = 0; j < s.n; ++j) {
      Vec<T> mean{};
      for (int64_t i = 0; i < s.m; ++i) {
        const int64_t e = (i * s.n + j) * kTile + at;
        mean += load(scratch.soft + e) * load(grad_logits + e);
      }
      for (int64_t i = 0; i < s.m; ++i) {
        const int64_t e = (i * s.n + j) * kTile + at;
        const Vec<T> grad = load(scratch.soft + e) * (load(grad_logits + e) - mean) * scale;
        along_tau -= grad * load(scratch.z + e);
        store(grad_logits + e, grad);
      }
    }
    for (int64_t i = 0; i < std::min<int64_t>(lanes, count - at); ++i) grad_tau += double(along_tau[i]);
  }
  return grad_tau;
}

template <typename T>
int64_t multiplex_scratch(const BlockSizes& s) {
  return RoutingScratch<T>::size(s) + (2 * s.m * s.d + 2 * s.m * s.n + s.n * s.d) * kTile;
}

template <typename T>
void multiplex_forward(const MultiplexArgs<T>& args, int64_t tile, T* memory) {
  const BlockSizes& s = args.size;
  const int64_t first = tile * kTile, count = std::min(kTile, s.batch - first);
  const RoutingScratch<T> scratch(s, memory);
  T* logits = memory + RoutingScratch<T>::size(s);
  T* blocks = logits + s.m * s.n * kTile;
  T* routed = blocks + s.m * s.d * kTile;
  into_tile(args.logits + first * s.m * s.n, count, s.m * s.n, logits);
  into_tile(args.blocks + first * s.m * s.d, count, s.m * s.d, blocks);
  const T* weights = route_weights(s, args.routing, first, count, logits, scratch);
  multiplex_tile(s, count, blocks, weights, routed);
  from_tile(routed, count, s.n * s.d, args.out + first * s.n * s.d);
}

template <typename T>
void multiplex_backward(const MultiplexArgs<T>& args, int64_t tile, T* memory) {
  const BlockSizes& s = args.size;
  const int64_t first = tile * kTile, count = std::min(kTile, s.batch - first);
  const RoutingScratch<T> scratch(s, memory);
  T* logits = memory + RoutingScratch<T>::size(s);
  T* grad_logits = logits + s.m * s.n * kTile;
  T* blocks = grad_logits + s.m * s.n * kTile;
  T* grad_blocks = blocks + s.m * s.d * kTile;
  T* grad = grad_blocks + s.m * s.d * kTile;
  into_tile(args.logits + first * s.m * s.n, count, s.m * s.n, logits);
  into_tile(args.blocks + first * s.m * s.d, count, s.m * s.d, blocks);
  into_tile(args.grad + first * s.n * s.d, count, s.n * s.d, grad);
  const T* weights = route_weights(s, args.routing, first, count, logits, scratch);
  args.grad_tau[tile] = multiplex_tile_backward(s, args.routing, count, blocks, grad, weights, scratch, grad_logits,
                                                grad_blocks, false);
  from_tile(grad_logits, count, s.m * s.n, args.grad_logits + first * s.m * s.n);
  from_tile(grad_blocks, count, s.m * s.d, args.grad_blocks + first * s.m * s.d);
}
