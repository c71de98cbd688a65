// multiplex: blocks [B, M, D], logits [B, M, N] -> [B, N, D]. Forward one launch, backward two.
#include "multiplex.cuh"

namespace fastmod::cuda {
namespace {

template <typename T>
__global__ void __launch_bounds__(kColumnThreads, 2)
    forward_kernel(const T* blocks, const T* logits, T* out, Routing<Compute<T>> routing, Shape shape) {
  multiplex_columns(blocks, logits, out, routing, shape, static_cast<int64_t>(blockIdx.x) * kColumns,
                    shape.batch * shape.n);
}

// With w the softmax weights and dw[m, c] = sum over d of grad[c, d] * blocks[b, m, d]:
//   dz = w * (dw - sum over m of w * dw), dlogits = dz / tau, dtau = sum of -dz * z / tau
template <typename T>
__global__ void __launch_bounds__(kColumnThreads, 2)
    backward_logits_kernel(const T* grad, const T* blocks, const T* logits, T* grad_logits, Compute<T>* weights,
                           Compute<T>* tau_partials, Routing<Compute<T>> routing, const Compute<T>* grad_penalty,
                           Compute<T> threshold, Shape shape) {
  using C = Compute<T>;
  FASTMOD_SHARED(C, scores, kChunk * kColumns);
  FASTMOD_SHARED(C, soft, kChunk * kColumns);
  FASTMOD_SHARED(C, grad_weights, kChunk * kColumns);
  FASTMOD_SHARED(C, top, kColumns);
  FASTMOD_SHARED(C, sum, kColumns);
  FASTMOD_SHARED(C, mean, kColumns);    // sum over m of w * dw
  FASTMOD_SHARED(C, centre, kColumns);  // sum over m of w * z
  FASTMOD_SHARED(int64_t, chosen, kColumns);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kColumns, end = shape.batch * shape.n;
  ColumnTile<T> tile(logits, routing, shape, first, end, scores, top, sum, chosen);
  tile.reduce();

  const bool active = tile.column < tile.count;
  const int64_t c = first + (active ? tile.column : 0), b = quotient(c, shape.n);
  const T* grad_row = grad + c * shape.d;
  const T* block = blocks + b * shape.m * shape.d;
  const auto fill = [&](int64_t m0) {  // soft and grad_weights of a chunk whose scores are loaded
    for (int m = tile.first_row(); active && m < tile.rows(m0); m += tile.kRowStep) {
      const int i = m * kColumns + tile.column;
      soft[i] = tile.soft(scores[i]);
      grad_weights[i] = dot(grad_row, block + (m0 + m) * shape.d, shape.d);
    }
  };

  C total = 0, scores_total = 0;
  for (int64_t m0 = 0; m0 < shape.m; m0 += kChunk) {
    if (!tile.one_chunk()) tile.load(m0);
    fill(m0);
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < tile.count) {
      for (int m = 0; m < tile.rows(m0); ++m) {
        const int i = m * kColumns + tile.column;
        total += soft[i] * grad_weights[i];
        scores_total += soft[i] * scores[i];
      }
    }
  }
  if (static_cast<int>(threadIdx.x) < tile.count) {
    mean[tile.column] = total;
    centre[tile.column] = scores_total;
  }
  __syncthreads();

  const C penalty = grad_penalty ? C(2) * *grad_penalty : C(0);
  C grad_tau = 0;
  for (int64_t m0 = 0; m0 < shape.m; m0 += kChunk) {
    if (!tile.one_chunk()) {  // the chunk was overwritten; each thread then reads only what it fills itself
      tile.load(m0);
      fill(m0);
    }
    for (int m = tile.first_row(); active && m < tile.rows(m0); m += tile.kRowStep) {
      const int i = m * kColumns + tile.column;
      const int64_t at = tile.offset + (m0 + m) * shape.n;
      const C grad_score = soft[i] * (grad_weights[i] - mean[tile.column]);
      // They sum to 0 over m, so z may be measured from anywhere; from its own mean a rounding of `mean` does not count.
      grad_tau -= grad_score * (scores[i] - centre[tile.column]) / tile.tau;
      C result = grad_score / tile.tau;
      if (grad_penalty) result += penalty * excess(widen(logits[at]), threshold);
      narrow(result, grad_logits + at);
      if (weights) weights[at] = tile.mode == kSoftmax ? soft[i] : tile.hard(m0 + m);
    }
  }
  if (tau_partials) {
    const C partial = block_sum(grad_tau);
    if (threadIdx.x == 0) tau_partials[blockIdx.x] = partial;
  }
}

// One thread per element of grad_blocks; neighbours share the weights (broadcast) and read grad side by side.
template <typename T>
__global__ void __launch_bounds__(256)
    backward_blocks_kernel(const T* grad, const Compute<T>* weights, const T* base, T* grad_blocks, Shape shape) {
  const int64_t e = global_thread();
  if (e >= shape.batch * shape.m * shape.d) return;
  const int64_t row = quotient(e, shape.d), b = quotient(row, shape.m);
  const Compute<T>* weight = weights + row * shape.n;
  const T* column = grad + b * shape.n * shape.d + (e - row * shape.d);
  Compute<T> total = base ? widen(base[e]) : Compute<T>(0);
  for (int64_t n = 0; n < shape.n; ++n) total += weight[n] * widen(column[n * shape.d]);
  narrow(total, grad_blocks + e);
}

}  // namespace

template <typename T>
cudaError_t multiplex_forward(const T* blocks, const T* logits, T* out, Routing<Compute<T>> routing, Shape shape,
                              cudaStream_t stream) {
  if (shape.batch * shape.n * shape.d == 0) return cudaSuccess;
  return FASTMOD_LAUNCH(forward_kernel<T>, blocks_for(shape.batch * shape.n, kColumns), kColumnThreads, stream, blocks,
                        logits, out, routing, shape);
}

int64_t multiplex_tau_partials(Shape shape) { return (shape.batch * shape.n + kColumns - 1) / kColumns; }

template <typename T>
cudaError_t multiplex_backward_logits(const T* grad, const T* blocks, const T* logits, T* grad_logits,
                                      Compute<T>* weights, Compute<T>* tau_partials, Routing<Compute<T>> routing,
                                      const Compute<T>* grad_penalty, Compute<T> threshold, Shape shape,
                                      cudaStream_t stream) {
  if (shape.batch * shape.n == 0) return cudaSuccess;
  return FASTMOD_LAUNCH(backward_logits_kernel<T>, blocks_for(shape.batch * shape.n, kColumns), kColumnThreads, stream,
                        grad, blocks, logits, grad_logits, weights, tau_partials, routing, grad_penalty, threshold,
                        shape);
}

template <typename T>
cudaError_t multiplex_backward_blocks(const T* grad, const Compute<T>* weights, const T* base, T* grad_blocks,
                                      Shape shape, cudaStream_t stream) {
  const int64_t elements = shape.batch * shape.m * shape.d;
  if (elements == 0) return cudaSuccess;
  return FASTMOD_LAUNCH(backward_blocks_kernel<T>, blocks_for(elements, 256), 256, stream, grad, weights, base,
                        grad_blocks, shape);
}

#define FASTMOD_INSTANTIATE(T)                                                                                       \
  template cudaError_t multiplex_forward<T>(const T*, const T*, T*, Routing<Compute<T>>, Shape, cudaStream_t);       \
  template cudaError_t multiplex_backward_logits<T>(const T*, const T*, const T*, T*, Compute<T>*, Compute<T>*,      \
                                                    Routing<Compute<T>>, const Compute<T>*, Compute<T>, Shape,       \
                                                    cudaStream_t);                                                   \
  template cudaError_t multiplex_backward_blocks<T>(const T*, const Compute<T>*, const T*, T*, Shape, cudaStream_t);
FASTMOD_INSTANTIATE(float)
FASTMOD_INSTANTIATE(double)
FASTMOD_INSTANTIATE(__half)
FASTMOD_INSTANTIATE(__nv_bfloat16)

}  // namespace fastmod::cuda
