// multiplex backward: the gradients of blocks, logits and temperature in one launch.
//
// With w the softmax weights and dw[m, n] = sum over d of grad[n, d] * blocks[m, d]:
//   dz = w * (dw - sum over m of w * dw), dlogits = dz / tau, dtau = sum of -dz * z / tau
// and dblocks[m, d] = sum over n of (weights of the forward)[m, n] * grad[n, d].
#include "multiplex_rows.cuh"
#include "reduce.cuh"

namespace fastmod::cuda {
namespace {

constexpr int kPlainThreads = 256;
constexpr int64_t kPlainBlocks = 1024;  // at most
constexpr int kSide = 4;                // a thread has kSide x kSide entries of dw

// Offsets in shared memory, after the gradient: blocks, scores, weights, gradients of weights.
struct Offsets {
  int blocks, scores, weights, grads, bytes;
};
template <typename T>
int64_t bytes_of(const Shape& shape, int64_t rows, int64_t stride, Offsets* offsets = nullptr) {
  const int64_t each = rows * stride * static_cast<int64_t>(sizeof(Compute<T>));
  const int64_t blocks = span_bytes<T>(rows * shape.n * shape.d);
  const int64_t scores = blocks + span_bytes<T>(rows * shape.m * shape.d), bytes = scores + 3 * each;
  if (offsets) {
    *offsets = {static_cast<int>(blocks), static_cast<int>(scores), static_cast<int>(scores + each),
                static_cast<int>(scores + 2 * each), static_cast<int>(bytes)};
  }
  return bytes;
}
template <typename T>
RowPlan plan_of(const Shape& shape) {
  return RowPlan(shape, shape.m, shared_limit(),
                 [&](int64_t rows, int64_t stride) { return bytes_of<T>(shape, rows, stride); });
}
int64_t plain_blocks(const Shape& shape) { return shape.batch < kPlainBlocks ? shape.batch : kPlainBlocks; }

template <typename T, bool kMixed>
struct Gradients {
  const T* grad;
  Operand<kMixed, const T> blocks;
  Operand<kMixed, const T> logits;
  Operand<kMixed, T> of_blocks;
  Operand<kMixed, T> of_logits;
  Compute<T>* of_tau;
  Routing<Compute<T>> routing;
  Compute<T>* scratch;
  unsigned* tickets;

  // Moves all pointers to a copy; scratch_each, tickets_each: per copy.
  __host__ __device__ void move_to(int64_t copy, const Shape& shape, int64_t scratch_each, int64_t tickets_each) {
    const int64_t rows = copy * shape.batch, of_rows = rows * shape.m * shape.d;
    grad += rows * shape.n * shape.d;
    blocks += of_rows;
    of_blocks += of_rows;
    logits += rows * shape.m * shape.n;
    of_logits += rows * shape.m * shape.n;
    of_tau = number_after(of_tau, routing.tau_type, copy);
    routing = routing_of(routing, copy);
    scratch += copy * scratch_each;
    tickets += copy * tickets_each;
  }
};

// For columns in [row][m][pitch]: dw -> dlogits, soft weights -> those of the forward. Returns a thread's share of
// dtau.
template <int kCount, typename C, typename Index>
__device__ C grad_columns(const C* scores, C* weights, C* grads, int mode, C tau, Index rows,
                          const Places<Index>& places) {
  const Index m = places.m, pitch = places.pitch;
  C grad_tau = 0;
  each_column<kCount>(rows, places, [&](Index place, Index column) {
    C mean[kCount] = {}, centre[kCount] = {};  // sums over m of w * dw and of w * z
#pragma unroll 2
    for (Index i = 0; i < m; ++i) {
      const auto z = read_pack<kCount>(scores + place + i * pitch), w = read_pack<kCount>(weights + place + i * pitch);
      const auto dw = read_pack<kCount>(grads + place + i * pitch);
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        mean[k] += w.v[k] * dw.v[k];
        centre[k] += w.v[k] * z.v[k];
      }
    }
    C sums[kCount] = {};
#pragma unroll 2
    for (Index i = 0; i < m; ++i) {
      const auto z = read_pack<kCount>(scores + place + i * pitch), w = read_pack<kCount>(weights + place + i * pitch);
      auto dw = read_pack<kCount>(grads + place + i * pitch);
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const C grad_score = w.v[k] * (dw.v[k] - mean[k]);
        // They sum to 0 over m, so any offset may be subtracted from z; subtracting its mean keeps the rounding error
        // of `mean` out of the result.
        sums[k] -= grad_score * (z.v[k] - centre[k]) / tau;
        dw.v[k] = grad_score / tau;
      }
      write_pack<kCount>(dw, grads + place + i * pitch);
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (column + k >= places.n) break;
      grad_tau += sums[k];
      if (mode != kSoftmax) hard_column(scores + place + k, weights + place + k, m, pitch);
    }
  });
  return grad_tau;
}

// dlogits to global memory.
template <typename T, bool kMixed, typename Index>
__device__ void write_grads(const Gradients<T, kMixed>& p, const Logits<T, kMixed>& own, const Compute<T>* grads,
                            Index count, const Places<Index>& places) {
  using C = Compute<T>;
  by_fours(own.first, count, [&](Index at, bool whole) {
    Pack<4, C> result;
    if (whole && places.by_fours()) {
      result = read_pack<4>(grads + places.of_four(at));
    } else {
      places.each_of_four(at, count, [&](int j, Index place) { result.v[j] = grads[place]; });
    }
    const auto to = p.of_logits + (own.first + at);
    if (whole && own.vector_grads) {
      put_pack(result.v, to);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (at + j >= 0 && at + j < count) put_at(result.v[j], to, j);
      }
    }
  });
}

// Adds up the blocks' partial sums for tau in a fixed order; writes zero if it was not asked for. partials: one per
// block.
template <typename T, bool kMixed>
__device__ void finish_tau(const Gradients<T, kMixed>& p, Compute<T> own, Compute<T>* partials) {
  using C = Compute<T>;
  if (!p.routing.tau) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.of_tau = C(0);
    return;
  }
  const C partial = block_sum(own);
  if (threadIdx.x == 0) partials[blockIdx.x] = partial;
  const auto reduce = [&](unsigned first, unsigned end, unsigned step, bool last) {
    C sum = 0;
    for (int64_t i = first + threadIdx.x * static_cast<int64_t>(step); i < end;
         i += blockDim.x * static_cast<int64_t>(step)) {
      sum += fresh(partials + i);
    }
    __syncthreads();  // the previous sum has been read
    sum = block_sum(sum);
    if (threadIdx.x == 0) put_number(sum, last ? p.of_tau : partials + first, last ? p.routing.tau_type : kWideNumber);
  };
  reduce_in_order<kGroup>(p.tickets, blockIdx.x, gridDim.x, reduce);
}

// dw of rows in shared memory: kSide x kSide entries per thread. 2^log_slices lanes share the depth and add up by
// shuffles: short sums keep rounding errors small.
template <int kVector, typename T>
__device__ void weight_gradients(const T* grad, const T* blocks, Compute<T>* grads, int rows, const RowPlan& plan,
                                 int log_slices) {
  using C = Compute<T>;
  const Places<int>& places = plan.places;
  const int tiles_n = quotient_of(places.n + kSide - 1, kSide);
  const int tiles = quotient_of(places.m + kSide - 1, kSide) * tiles_n;
  const int items = rows * tiles << log_slices, slices = 1 << log_slices;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < round_to_warps(items); i += static_cast<int>(blockDim.x)) {
    const int slice = i & (slices - 1), item = (i < items ? i : items - 1) >> log_slices;
    const int row = quotient_of(item, tiles), tile = item - row * tiles, tile_m = quotient_of(tile, tiles_n);
    const int m0 = tile_m * kSide, n0 = (tile - tile_m * tiles_n) * kSide;
    const T* x[kSide];
    const T* g[kSide];
#pragma unroll
    for (int j = 0; j < kSide; ++j) {  // beyond the edges the last one again, whose result is not stored
      x[j] = blocks + (row * places.m + (m0 + j < places.m ? m0 + j : places.m - 1)) * plan.d;
      g[j] = grad + (row * places.n + (n0 + j < places.n ? n0 + j : places.n - 1)) * plan.d;
    }
    C sums[kSide][kSide] = {};
#pragma unroll 1
    for (int d = slice * kVector; d < plan.d; d += kVector << log_slices) {
      C right[kSide][kVector];
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        const auto read = read_pack<kVector>(g[j] + d);
#pragma unroll
        for (int k = 0; k < kVector; ++k) right[j][k] = widen(read.v[k]);
      }
#pragma unroll
      for (int l = 0; l < kSide; ++l) {
        const auto read = read_pack<kVector>(x[l] + d);
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
#pragma unroll
          for (int j = 0; j < kSide; ++j) sums[l][j] += widen(read.v[k]) * right[j][k];
        }
      }
    }
#pragma unroll 1
    for (int offset = slices / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (int l = 0; l < kSide; ++l) {
#pragma unroll
        for (int j = 0; j < kSide; ++j) sums[l][j] += __shfl_xor_sync(kAllLanes, sums[l][j], offset);
      }
    }
    if (slice != 0 || i >= items) continue;
    C* to = grads + row * places.stride + m0 * places.pitch + n0;
#pragma unroll
    for (int l = 0; l < kSide; ++l) {
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        if (m0 + l < places.m && n0 + j < places.n) to[l * places.pitch + j] = sums[l][j];
      }
    }
  }
}

// dblocks[m, d] = sum over n of weights[m, n] * grad[n, d]. A thread has kTile blocks of kVector numbers.
template <int kVector, typename T, typename To>
__device__ void spread_rows(const T* grad, const Compute<T>* weights, const To& to_blocks, int rows,
                            const RowPlan& plan) {
  using C = Compute<T>;
  constexpr int kTile = tile_of(kVector);
  const Places<int>& places = plan.places;
  const int across = quotient_of(plan.d, kVector), each = quotient_of(places.m + kTile - 1, kTile) * across;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < rows * each; i += static_cast<int>(blockDim.x)) {
    const int row = quotient_of(i, each), rest = i - row * each, tile = quotient_of(rest, across);
    const int column = (rest - tile * across) * kVector, m0 = tile * kTile;
    const T* g = grad + row * places.n * plan.d + column;
    const C* w = weights + row * places.stride;
    int line[kTile];
#pragma unroll
    for (int j = 0; j < kTile; ++j) line[j] = (m0 + j < places.m ? m0 + j : places.m - 1) * places.pitch;
    C sums[kTile][kVector] = {};
    // Four n at a time as long as there are four: the pitch is a multiple of four.
    int n = 0;
#pragma unroll 1
    for (; n + 4 <= places.n; n += 4) {
      C values[4][kVector];
#pragma unroll
      for (int l = 0; l < 4; ++l, g += plan.d) {
        const auto read = read_pack<kVector>(g);
#pragma unroll
        for (int k = 0; k < kVector; ++k) values[l][k] = widen(read.v[k]);
      }
#pragma unroll
      for (int j = 0; j < kTile; ++j) {
        const auto weight = read_pack<4>(w + line[j] + n);
#pragma unroll
        for (int l = 0; l < 4; ++l) {
#pragma unroll
          for (int k = 0; k < kVector; ++k) sums[j][k] += weight.v[l] * values[l][k];
        }
      }
    }
#pragma unroll 1
    for (; n < places.n; ++n, g += plan.d) {
      const auto read = read_pack<kVector>(g);
#pragma unroll
      for (int j = 0; j < kTile; ++j) {
        const C weight = w[line[j] + n];
#pragma unroll
        for (int k = 0; k < kVector; ++k) sums[j][k] += weight * widen(read.v[k]);
      }
    }
    const int64_t first = (static_cast<int64_t>(row) * places.m + m0) * plan.d + column;
#pragma unroll
    for (int j = 0; j < kTile; ++j) {
      if (m0 + j >= places.m) break;
      const int64_t at = first + static_cast<int64_t>(j) * plan.d;
      put_pack(sums[j], to_blocks + at);
    }
  }
}

template <typename T, int kVector, bool kMixed>
__global__ void __launch_bounds__(kRowThreads, 2)
    backward_kernel(const __grid_constant__ Gradients<T, kMixed> all, const __grid_constant__ Shape shape,
                    int tickets_each, int log_slices, const __grid_constant__ Offsets offsets,
                    const __grid_constant__ RowPlan plan) {
  using C = Compute<T>;
  FASTMOD_DYNAMIC_SHARED(memory);
  Gradients<T, kMixed> p = all;
  if (gridDim.y > 1) p.move_to(blockIdx.y, shape, gridDim.x, tickets_each);
  C* scores = reinterpret_cast<C*>(memory + offsets.scores);
  C* weights = reinterpret_cast<C*>(memory + offsets.weights);
  C* grads = reinterpret_cast<C*>(memory + offsets.grads);
  const Places<int>& places = plan.places;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * plan.rows, left = shape.batch - first;
  const int rows = static_cast<int>(left < plan.rows ? left : plan.rows);
  const int of_grad = places.n * plan.d, of_blocks = places.m * plan.d, of_logits = places.m * places.n;
  const T* grad = copy_span(p.grad + first * of_grad, rows * of_grad, memory);
  const T* blocks = copy_span(p.blocks + first * of_blocks, rows * of_blocks, memory + offsets.blocks);
  commit_copies();
  const Logits<T, kMixed> own{p.logits, plan.vector_logits, first * of_logits, plan.vector_grads};
  const C tau = temperature_of(p.routing);
  own.load_scores(p.routing, tau, rows * of_logits, places, scores);
  wait_copies<0>();
  __syncthreads();
  soft_columns<2>(scores, weights, rows, places);
  weight_gradients<kVector>(grad, blocks, grads, rows, plan, log_slices);
  __syncthreads();
  const C grad_tau = grad_columns<2>(scores, weights, grads, p.routing.mode, tau, rows, places);
  __syncthreads();
  write_grads(p, own, grads, rows * of_logits, places);
  spread_rows<kVector>(grad, weights, p.of_blocks + first * of_blocks, rows, plan);
  finish_tau(p, grad_tau, p.scratch);
}

// For any size: a block takes one batch row after another, and scratch memory replaces shared memory.
template <typename T, bool kMixed>
__global__ void __launch_bounds__(kPlainThreads, 2)
    backward_plain_kernel(const __grid_constant__ Gradients<T, kMixed> p, const __grid_constant__ Shape shape,
                          bool vector_logits, bool vector_grads) {
  using C = Compute<T>;
  const int64_t m = shape.m, n = shape.n, d = shape.d, each = m * n;
  const Places<int64_t> places{m, n, n, each};
  C* scores = p.scratch + blockIdx.x * 3 * each;  // a multiple of four if n is one, for alignment
  C* weights = scores + each;
  C* grads = weights + each;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const C tau = temperature_of(p.routing);
  C grad_tau = 0;
  for (int64_t b = blockIdx.x; b < shape.batch; b += gridDim.x) {
    const Logits<T, kMixed> own{p.logits, vector_logits, b * each, vector_grads};
    __syncthreads();  // results of the previous row have been read
    own.load_scores(p.routing, tau, each, places, scores);
    __syncthreads();
    soft_columns<1>(scores, weights, int64_t(1), places);
    // dw: a warp takes a block and kSide outputs; its lanes share the depth.
    const auto x = p.blocks + b * m * d;
    const T* g = p.grad + b * n * d;
    const int64_t tiles = (n + kSide - 1) / kSide;
    for (int64_t i = warp; i < m * tiles; i += kPlainThreads / kWarp) {
      const int64_t row = quotient(i, tiles), n0 = (i - row * tiles) * kSide;
      C sums[kSide] = {};
      for (int64_t at = lane; at < d;) {  // short sums first: rows are long here, and errors grow with a sum's length
        C parts[kSide] = {};
        for (const int64_t end = at + 16 * kWarp < d ? at + 16 * kWarp : d; at < end; at += kWarp) {
          const C value = value_at(x, row * d + at);
#pragma unroll
          for (int j = 0; j < kSide; ++j) parts[j] += value * widen(g[(n0 + j < n ? n0 + j : n - 1) * d + at]);
        }
#pragma unroll
        for (int j = 0; j < kSide; ++j) sums[j] += parts[j];
      }
#pragma unroll
      for (int j = 0; j < kSide; ++j) {
        for (int offset = kWarp / 2; offset > 0; offset /= 2) sums[j] += __shfl_xor_sync(kAllLanes, sums[j], offset);
        if (lane == 0 && n0 + j < n) grads[row * n + n0 + j] = sums[j];
      }
    }
    __syncthreads();
    grad_tau += grad_columns<1>(scores, weights, grads, p.routing.mode, tau, int64_t(1), places);
    __syncthreads();
    write_grads(p, own, grads, each, places);
    for (int64_t e = threadIdx.x; e < m * d; e += kPlainThreads) {
      const int64_t row = quotient(e, d), at = b * m * d + e;
      C total = 0;
      for (int64_t i = 0; i < n; ++i) total += weights[row * n + i] * widen(g[i * d + e - row * d]);
      put_at(total, p.of_blocks, at);
    }
  }
  finish_tau(p, grad_tau, p.scratch + gridDim.x * 3 * each);
}

template <typename T, int kVector, bool kMixed>
cudaError_t launch_backward(const Gradients<T, kMixed>& p, RowPlan plan, const Shape& shape, cudaStream_t stream) {
  plan.align(shape, kVector, packs<4>(p.logits), packs<4>(p.of_logits));
  Offsets offsets;
  bytes_of<T>(shape, plan.rows, plan.places.stride, &offsets);
  // Sums of at most 32 terms, or of 16 if threads would be idle otherwise.
  const int64_t tiles = plan.rows * ((shape.m + kSide - 1) / kSide) * ((shape.n + kSide - 1) / kSide);
  int log_slices = 0;
  const auto longer = [&](int64_t terms) { return shape.d > terms << log_slices; };
  while (log_slices < 5 && (longer(32) || (longer(16) && tiles << log_slices < plan.threads))) ++log_slices;
  const unsigned blocks = blocks_for(shape.batch, plan.rows).x;
  const auto tickets = static_cast<int>(reduce_tickets<kGroup>(blocks));
  return by_copies(shape.copies, [&](int64_t first, unsigned count) {
    auto some = p;
    some.move_to(first, shape, blocks, tickets);
    return FASTMOD_LAUNCH_LARGE((backward_kernel<T, kVector, kMixed>), dim3(blocks, count), plan.threads,
                                static_cast<size_t>(offsets.bytes), stream, some, shape, tickets, log_slices, offsets,
                                plan);
  });
}

template <typename T, bool kMixed>
cudaError_t backward_of(const Gradients<T, kMixed>& p, const Shape& shape, cudaStream_t stream) {
  const RowPlan plan = plan_of<T>(shape);
  if (!plan.fits) {
    cudaError_t error = cudaSuccess;
    for (int64_t copy = 0; copy < shape.copies && error == cudaSuccess; ++copy) {
      auto own = p;
      own.move_to(copy, shape, 0, 0);
      error = FASTMOD_LAUNCH((backward_plain_kernel<T, kMixed>), blocks_for(plain_blocks(shape), 1), kPlainThreads,
                             stream, own, shape, packs<4>(own.logits), packs<4>(own.of_logits));
    }
    return error;
  }
  const auto aligned_to = [&](auto count) {
    constexpr int kVector = decltype(count)::value;
    return shape.d % kVector == 0 && packs<kVector>(p.grad) && packs<kVector>(p.blocks) && packs<kVector>(p.of_blocks);
  };
  if (aligned_to(std::integral_constant<int, 4>())) return launch_backward<T, 4>(p, plan, shape, stream);
  if (aligned_to(std::integral_constant<int, 2>())) return launch_backward<T, 2>(p, plan, shape, stream);
  return launch_backward<T, 1>(p, plan, shape, stream);
}

}  // namespace

template <typename T>
Scratch multiplex_backward_scratch(Shape shape, bool learned) {
  const RowPlan plan = plan_of<T>(shape);
  const int64_t blocks = plan.fits ? (shape.batch + plan.rows - 1) / plan.rows : plain_blocks(shape);
  // Copies that do not fit into shared memory run one after the other.
  return {(learned ? blocks * (plan.fits ? shape.copies : 1) : 0) + (plan.fits ? 0 : blocks * 3 * shape.m * shape.n),
          learned ? reduce_tickets<kGroup>(blocks) * (plan.fits ? shape.copies : 1) : 0};
}

template <typename T>
cudaError_t multiplex_backward(const T* grad, Mixed<const T> blocks, Mixed<const T> logits, Mixed<T> grad_blocks,
                               Mixed<T> grad_logits, Compute<T>* grad_tau, Routing<Compute<T>> routing,
                               Compute<T>* scratch, unsigned* tickets, Shape shape, cudaStream_t stream) {
  if (shape.batch == 0) return cudaSuccess;
  const auto run = [&](auto mixed) {
    constexpr bool kMixed = decltype(mixed)::value;
    const Gradients<T, kMixed> p{grad, operand<kMixed>(blocks), operand<kMixed>(logits), operand<kMixed>(grad_blocks),
                                 operand<kMixed>(grad_logits), grad_tau, routing, scratch, tickets};
    return backward_of(p, shape, stream);
  };
  return with_mixed<T>(run, blocks, logits);
}

#define FASTMOD_INSTANTIATE(T)                                                                                       \
  template Scratch multiplex_backward_scratch<T>(Shape, bool);                                                       \
  template cudaError_t multiplex_backward<T>(const T*, Mixed<const T>, Mixed<const T>, Mixed<T>, Mixed<T>,           \
                                             Compute<T>*, Routing<Compute<T>>, Compute<T>*, unsigned*, Shape,        \
                                             cudaStream_t);
FASTMOD_INSTANTIATE(float)
FASTMOD_INSTANTIATE(double)
FASTMOD_INSTANTIATE(__half)
FASTMOD_INSTANTIATE(__nv_bfloat16)

}  // namespace fastmod::cuda
