// multiplex forward: blocks [B, M, D], logits [B, M, N] -> [B, N, D]. One launch.
#include "multiplex_rows.cuh"

namespace fastmod::cuda {
namespace {

template <typename T>
int64_t blocks_bytes(const Shape& shape, int64_t rows) {
  return span_bytes<T>(rows * shape.m * shape.d);
}
template <typename T>
int64_t bytes_of(const Shape& shape, int64_t rows, int64_t stride) {
  return blocks_bytes<T>(shape, rows) + rows * stride * static_cast<int64_t>(sizeof(Compute<T>));
}

// out[n, d] = sum over m of weights[m, n] * blocks[m, d]. A thread has kTile outputs of kVector numbers, so that it
// uses every number it reads several times.
template <int kVector, typename T>
__device__ void mix_rows(const T* blocks, const Compute<T>* weights, T* out, int rows, const RowPlan& plan) {
  using C = Compute<T>;
  constexpr int kTile = tile_of(kVector);
  const Places<int>& places = plan.places;
  const int across = quotient_of(plan.d, kVector), each = quotient_of(places.pitch, kTile) * across;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < rows * each; i += static_cast<int>(blockDim.x)) {
    const int row = quotient_of(i, each), rest = i - row * each, tile = quotient_of(rest, across);
    const int column = (rest - tile * across) * kVector, n0 = tile * kTile;
    const T* x = blocks + row * places.m * plan.d + column;
    const C* w = weights + row * places.stride + n0;
    C sums[kTile][kVector] = {};
    in_order(places.m, [&](int) {
      const auto value = read_pack<kVector>(x);
      C wide[kVector];
#pragma unroll
      for (int k = 0; k < kVector; ++k) wide[k] = widen(value.v[k]);
#pragma unroll
      for (int j = 0; j < kTile; j += 4) {
        const auto weight = read_pack<4>(w + j);
#pragma unroll
        for (int l = 0; l < 4; ++l) {
#pragma unroll
          for (int k = 0; k < kVector; ++k) sums[j + l][k] += weight.v[l] * wide[k];
        }
      }
      x += plan.d;
      w += places.pitch;
    });
    T* to = out + (static_cast<int64_t>(row) * places.n + n0) * plan.d + column;
    const auto store = [&](int j) {
      put_pack(sums[j], to);
      to += plan.d;
    };
    if (n0 + kTile <= places.n) {
#pragma unroll
      for (int j = 0; j < kTile; ++j) store(j);
    } else {
#pragma unroll
      for (int j = 0; j < kTile; ++j) {
        if (n0 + j < places.n) store(j);
      }
    }
  }
}

template <typename T, int kVector, bool kMixed>
__global__ void __launch_bounds__(kRowThreads, 2)
    forward_kernel(Operand<kMixed, const T> blocks, Operand<kMixed, const T> logits, T* out,
                   const __grid_constant__ Routing<Compute<T>> routing, int64_t batch, int weights_at,
                   const __grid_constant__ RowPlan plan) {
  using C = Compute<T>;
  FASTMOD_DYNAMIC_SHARED(memory);
  C* weights = reinterpret_cast<C*>(memory + weights_at);
  const Places<int>& places = plan.places;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * plan.rows, left = batch - first;
  const int rows = static_cast<int>(left < plan.rows ? left : plan.rows), each = places.m * plan.d;
  const int of_row = places.m * places.n;
  const int64_t copy = gridDim.y > 1 ? blockIdx.y : 0;
  if (gridDim.y > 1) {
    blocks += copy * batch * each;
    logits += copy * batch * of_row;
    out += copy * batch * places.n * plan.d;
  }
  const T* held = copy_span(blocks + first * each, rows * each, memory);
  commit_copies();
  const Logits<T, kMixed> own{logits, plan.vector_logits, first * of_row};
  const Routing<C> ours = gridDim.y > 1 ? routing_of(routing, copy) : routing;
  own.load_scores(ours, temperature_of(ours), rows * of_row, places, weights);
  __syncthreads();
  if (routing.mode == kSoftmax) {
    soft_columns<4>(weights, weights, rows, places);
  } else {
    each_column<1>(rows, places, [&](int place, int) {
      hard_column(weights + place, weights + place, places.m, places.pitch);
    });
  }
  wait_copies<0>();
  __syncthreads();
  mix_rows<kVector>(held, weights, out + first * places.n * plan.d, rows, plan);
}

// For any size.
template <typename T, bool kMixed>
__global__ void __launch_bounds__(kColumnThreads, 2)
    forward_plain_kernel(Operand<kMixed, const T> blocks, Operand<kMixed, const T> logits, T* out,
                         Routing<Compute<T>> routing, Shape shape) {
  const int64_t copy = blockIdx.y, rows = copy * shape.batch;
  multiplex_columns<kMixed>(blocks + rows * shape.m * shape.d, logits + rows * shape.m * shape.n,
                            out + rows * shape.n * shape.d, routing_of(routing, copy), shape,
                            static_cast<int64_t>(blockIdx.x) * kColumns, shape.batch * shape.n);
}

template <typename T, int kVector, bool kMixed>
cudaError_t launch_forward(Operand<kMixed, const T> blocks, Operand<kMixed, const T> logits, T* out,
                           const Routing<Compute<T>>& routing, RowPlan plan, const Shape& shape,
                           cudaStream_t stream) {
  plan.align(shape, kVector, packs<4>(logits));
  const auto bytes = static_cast<size_t>(bytes_of<T>(shape, plan.rows, plan.places.stride));
  return by_copies(shape.copies, [&](int64_t first, unsigned count) {
    const dim3 grid(blocks_for(shape.batch, plan.rows).x, count);
    const int64_t rows = first * shape.batch;
    return FASTMOD_LAUNCH_LARGE((forward_kernel<T, kVector, kMixed>), grid, plan.threads, bytes, stream,
                                blocks + rows * shape.m * shape.d, logits + rows * shape.m * shape.n,
                                out + rows * shape.n * shape.d, routing_of(routing, first), shape.batch,
                                static_cast<int>(blocks_bytes<T>(shape, plan.rows)), plan);
  });
}

template <typename T, bool kMixed>
cudaError_t forward_of(Operand<kMixed, const T> blocks, Operand<kMixed, const T> logits, T* out,
                       const Routing<Compute<T>>& routing, const Shape& shape, cudaStream_t stream) {
  const RowPlan plan(shape, shape.n, shared_limit(), [&](int64_t rows, int64_t stride) {
    return bytes_of<T>(shape, rows, stride);
  });
  if (!plan.fits) {
    return by_copies(shape.copies, [&](int64_t first, unsigned count) {
      const dim3 grid(blocks_for(shape.batch * shape.n, kColumns).x, count);
      const int64_t rows = first * shape.batch;
      return FASTMOD_LAUNCH((forward_plain_kernel<T, kMixed>), grid, kColumnThreads, stream,
                            blocks + rows * shape.m * shape.d, logits + rows * shape.m * shape.n,
                            out + rows * shape.n * shape.d, routing_of(routing, first), shape);
    });
  }
  if (shape.d % 4 == 0 && packs<4>(blocks) && packs<4>(out)) {
    return launch_forward<T, 4, kMixed>(blocks, logits, out, routing, plan, shape, stream);
  }
  if (shape.d % 2 == 0 && packs<2>(blocks) && packs<2>(out)) {
    return launch_forward<T, 2, kMixed>(blocks, logits, out, routing, plan, shape, stream);
  }
  return launch_forward<T, 1, kMixed>(blocks, logits, out, routing, plan, shape, stream);
}

}  // namespace

template <typename T>
cudaError_t multiplex_forward(Mixed<const T> blocks, Mixed<const T> logits, T* out, Routing<Compute<T>> routing,
                              Shape shape, cudaStream_t stream) {
  if (shape.copies * shape.batch * shape.n * shape.d == 0) return cudaSuccess;
  const auto run = [&](auto mixed) {
    constexpr bool kMixed = decltype(mixed)::value;
    return forward_of<T, kMixed>(operand<kMixed>(blocks), operand<kMixed>(logits), out, routing, shape, stream);
  };
  return with_mixed<T>(run, blocks, logits);
}

#define FASTMOD_INSTANTIATE(T)                                                                                \
  template cudaError_t multiplex_forward<T>(Mixed<const T>, Mixed<const T>, T*, Routing<Compute<T>>, Shape, \
                                            cudaStream_t);
FASTMOD_INSTANTIATE(float)
FASTMOD_INSTANTIATE(double)
FASTMOD_INSTANTIATE(__half)
FASTMOD_INSTANTIATE(__nv_bfloat16)

}  // namespace fastmod::cuda
