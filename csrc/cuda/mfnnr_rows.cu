// Routing and gated residual, forward and backward, of an MFNNR that smfr.cu cannot handle: the steps between its
// matrix products. One block per row of the batch. Any M, N and D: routing weights are in global memory.
#include "smfr.cuh"

namespace fastmod::cuda {
namespace {

constexpr int kThreads = 128;

template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    route_kernel(const __grid_constant__ Blocks<T> x, const Compute<T>* logits, Compute<T>* weights, Compute<T>* routed,
                 const __grid_constant__ Routing<Compute<T>> routing, const __grid_constant__ Shape shape) {
  using C = Compute<T>;
  const int64_t row = blockIdx.x, width = shape.m * shape.n;
  const int m_count = static_cast<int>(shape.m), n_count = static_cast<int>(shape.n);
  const int d_count = static_cast<int>(shape.d);
  const RoutingColumn<C> column(routing);
  C* own = weights + row * width;
  for (int n = threadIdx.x; n < n_count; n += kThreads) {
    for (int64_t i = n; i < width; i += n_count) own[i] = logits[row * width + i];
    column.weigh(own + n, m_count, n_count, row * width + n);
  }
  __syncthreads();
  const int64_t first = row * shape.m * shape.d;
  for (int f = threadIdx.x; f < n_count * d_count; f += kThreads) {
    const int n = f / d_count, d = f - n * d_count;
    C total = 0;
#pragma unroll 4
    for (int64_t m = 0; m < m_count; ++m) total += own[m * n_count + n] * read_at(x, first + m * d_count + d);
    routed[row * shape.n * shape.d + f] = total;
  }
}

template <typename C>
__device__ inline C squared_excess(C logit, C threshold) {
  const C over = excess(logit, threshold);
  return over * over;
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    gate_kernel(const Compute<T>* routed, const Compute<T>* updated, const Compute<T>* logits, T* out, T* gate,
                Compute<T> threshold, Compute<T>* partials, int layers, Compute<T>* total, unsigned* ticket,
                const __grid_constant__ Shape shape) {
  using C = Compute<T>;
  const int64_t row = blockIdx.x, values = shape.n * shape.d, width = shape.m * shape.n;
  const int n_count = static_cast<int>(shape.n), d_count = static_cast<int>(shape.d);
  const C* fresh_values = updated + row * (values + shape.n);
  const C* gates = fresh_values + values;
  for (int f = threadIdx.x; f < n_count * d_count; f += kThreads) {
    const C logit = gates[f / d_count];
    narrow(sigmoid(logit) * fresh_values[f] + sigmoid(-logit) * routed[row * values + f], out + row * values + f);
  }
  C own = 0;
  for (int n = threadIdx.x; n < n_count; n += kThreads) {
    narrow(gates[n], gate + row * shape.n + n);
    if (threshold >= C(0)) own += squared_excess(gates[n], threshold);
  }
  for (int64_t i = threadIdx.x; i < width && threshold >= C(0); i += kThreads) {
    own += squared_excess(logits[row * width + i], threshold);
  }
  const C sum = block_sum(own);
  if (threadIdx.x == 0) partials[row] = sum;
  if (!total || !last_to_arrive(ticket, gridDim.x)) return;
  const C* all = partials - (layers - 1) * shape.batch;
  C share = 0;
  for (int64_t i = threadIdx.x; i < layers * shape.batch; i += kThreads) share += fresh(all + i);
  share = block_sum(share);
  if (threadIdx.x == 0) *total = share;
}

// `lanes` threads (a power of two, at most a warp) share a sum.
template <typename C>
__device__ inline C sum_of_lanes(C value, int lanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    gate_backward_kernel(const T* grad, const Compute<T>* routed, const Compute<T>* updated, Compute<T>* grad_routed,
                         Compute<T>* grad_updated, const Compute<T>* grad_penalty, Compute<T> threshold,
                         const __grid_constant__ Shape shape, int lanes) {
  using C = Compute<T>;
  const int64_t row = blockIdx.x, values = shape.n * shape.d;
  const int n_count = static_cast<int>(shape.n), d_count = static_cast<int>(shape.d);
  const int lane = static_cast<int>(threadIdx.x) % lanes, groups = kThreads / lanes;
  const C* outputs = updated + row * (values + shape.n);
  C* grads = grad_updated + row * (values + shape.n);
  for (int n0 = 0; n0 < n_count; n0 += groups) {
    const int n = n0 + static_cast<int>(threadIdx.x) / lanes;
    const bool active = n < n_count;  // inactive lanes stay for the shuffles
    const C logit = active ? outputs[values + n] : C(0), open = sigmoid(logit), shut = sigmoid(-logit);
    C total = 0;
    for (int d = lane; active && d < d_count; d += lanes) {
      const int f = n * d_count + d;
      const int64_t at = row * values + f;
      const C above = grad ? C(widen(grad[at])) : C(0);
      if (grad) total += above * (outputs[f] - routed[at]);
      grads[f] = open * above;
      grad_routed[at] = shut * above;
    }
    total = sum_of_lanes(total, lanes);
    if (active && lane == 0) {
      total *= open * shut;
      if (grad_penalty) total += C(2) * *grad_penalty * excess(logit, threshold);
      grads[values + n] = total;
    }
  }
}

// With w the softmax weights and dw[m, n] = sum over d of grad[n, d] * x[m, d]:
//   dz = w * (dw - sum over m of w * dw), dlogits = dz / tau, dtau = sum of -dz * z / tau
template <typename T>
__global__ void __launch_bounds__(kThreads, 2)
    route_backward_kernel(const Compute<T>* grad_routed, const __grid_constant__ Blocks<T> x, const Compute<T>* logits,
                          Compute<T>* grad_logits, Compute<T>* weights, Compute<T>* grad_x, bool add,
                          Compute<T>* tau_partials, const __grid_constant__ Routing<Compute<T>> routing,
                          const Compute<T>* grad_penalty, Compute<T> threshold, const __grid_constant__ Shape shape,
                          int lanes) {
  using C = Compute<T>;
  const int64_t row = blockIdx.x, features = shape.m * shape.d;
  const int m_count = static_cast<int>(shape.m), n_count = static_cast<int>(shape.n);
  const int d_count = static_cast<int>(shape.d);
  const int width = m_count * n_count;
  const int lane = static_cast<int>(threadIdx.x) % lanes, groups = kThreads / lanes;
  const C* above = grad_routed + row * shape.n * shape.d;
  const C* own_logits = logits + row * width;
  C *grads = grad_logits + row * width, *own = weights + row * width;
  for (int i0 = 0; i0 < width; i0 += groups) {  // grads: at first those of the weights
    const int i = i0 + static_cast<int>(threadIdx.x) / lanes, m = i / n_count, n = i - m * n_count;
    C total = 0;
    for (int d = lane; i < width && d < d_count; d += lanes) {
      total += above[n * d_count + d] * read_at(x, row * features + static_cast<int64_t>(m) * d_count + d);
    }
    total = sum_of_lanes(total, lanes);
    if (i < width && lane == 0) {
      grads[i] = total;
      own[i] = own_logits[i];
    }
  }
  __syncthreads();
  const RoutingColumn<C> column(routing);
  const C penalty = grad_penalty ? C(2) * *grad_penalty : C(0);
  C grad_tau = 0;
  for (int n = threadIdx.x; n < n_count; n += kThreads) {
    auto found = column.scores(own + n, m_count, n_count, row * width + n);
    column.add_up(own + n, m_count, n_count, found);
    C mean = 0, centre = 0;  // means over m of the weights' gradients and of the scores
    for (int i = n; i < width; i += n_count) {
      const C weight = column.soft(own[i], found);
      mean += weight * grads[i];
      centre += weight * own[i];
    }
    for (int m = 0; m < m_count; ++m) {
      const int i = m * n_count + n;
      const C score = own[i], grad = column.soft(score, found) * (grads[i] - mean);
      // They sum to 0 over m, so any offset may be subtracted from the scores; subtracting their mean keeps its
      // rounding error out of the result.
      grad_tau -= grad * (score - centre) / column.tau;
      C result = grad / column.tau;
      if (grad_penalty) result += penalty * excess(own_logits[i], threshold);
      grads[i] = result;
      own[i] = column.forward_weight(score, m, found);
    }
  }
  if (tau_partials) {
    const C total = block_sum(grad_tau);
    if (threadIdx.x == 0) tau_partials[row] = total;
  }
  if (!grad_x) return;
  __syncthreads();
  for (int64_t f = threadIdx.x; f < features; f += kThreads) {
    const int64_t m = quotient(f, d_count), d = f - m * d_count;
    C total = add ? grad_x[row * features + f] : C(0);
#pragma unroll 4
    for (int n = 0; n < n_count; ++n) total += own[m * n_count + n] * above[n * d_count + d];
    grad_x[row * features + f] = total;
  }
}

int lanes_for(int64_t d) {
  int lanes = 1;
  while (lanes < kWarp && lanes < d) lanes *= 2;
  return lanes;
}

}  // namespace

template <typename T>
cudaError_t mfnnr_route(Blocks<T> x, const Compute<T>* logits, Compute<T>* weights, Compute<T>* routed,
                        Routing<Compute<T>> routing, Shape shape, cudaStream_t stream) {
  if (shape.batch == 0) return cudaSuccess;
  return FASTMOD_LAUNCH(route_kernel<T>, blocks_for(shape.batch, 1), kThreads, stream, x, logits, weights, routed,
                        routing, shape);
}

template <typename T>
cudaError_t mfnnr_gate(const Compute<T>* routed, const Compute<T>* updated, const Compute<T>* logits, T* out, T* gate,
                       Compute<T> threshold, Compute<T>* partials, int layers, Compute<T>* total, unsigned* ticket,
                       Shape shape, cudaStream_t stream) {
  if (shape.batch == 0) return cudaSuccess;
  return FASTMOD_LAUNCH(gate_kernel<T>, blocks_for(shape.batch, 1), kThreads, stream, routed, updated, logits, out,
                        gate, threshold, partials, layers, total, ticket, shape);
}

template <typename T>
cudaError_t mfnnr_gate_backward(const T* grad, const Compute<T>* routed, const Compute<T>* updated,
                                Compute<T>* grad_routed, Compute<T>* grad_updated, const Compute<T>* grad_penalty,
                                Compute<T> threshold, Shape shape, cudaStream_t stream) {
  if (shape.batch == 0) return cudaSuccess;
  return FASTMOD_LAUNCH(gate_backward_kernel<T>, blocks_for(shape.batch, 1), kThreads, stream, grad, routed, updated,
                        grad_routed, grad_updated, grad_penalty, threshold, shape, lanes_for(shape.d));
}

template <typename T>
cudaError_t mfnnr_route_backward(const Compute<T>* grad_routed, Blocks<T> x, const Compute<T>* logits,
                                 Compute<T>* grad_logits, Compute<T>* weights, Compute<T>* grad_x, bool add,
                                 Compute<T>* tau_partials, Routing<Compute<T>> routing, const Compute<T>* grad_penalty,
                                 Compute<T> threshold, Shape shape, cudaStream_t stream) {
  if (shape.batch == 0) return cudaSuccess;
  return FASTMOD_LAUNCH(route_backward_kernel<T>, blocks_for(shape.batch, 1), kThreads, stream, grad_routed, x, logits,
                        grad_logits, weights, grad_x, add, tau_partials, routing, grad_penalty, threshold, shape,
                        lanes_for(shape.d));
}

#define FASTMOD_INSTANTIATE(T)                                                                                        \
  template cudaError_t mfnnr_route<T>(Blocks<T>, const Compute<T>*, Compute<T>*, Compute<T>*, Routing<Compute<T>>,     \
                                      Shape, cudaStream_t);                                                           \
  template cudaError_t mfnnr_gate<T>(const Compute<T>*, const Compute<T>*, const Compute<T>*, T*, T*, Compute<T>,     \
                                     Compute<T>*, int, Compute<T>*, unsigned*, Shape, cudaStream_t);                  \
  template cudaError_t mfnnr_gate_backward<T>(const T*, const Compute<T>*, const Compute<T>*, Compute<T>*,            \
                                              Compute<T>*, const Compute<T>*, Compute<T>, Shape, cudaStream_t);       \
  template cudaError_t mfnnr_route_backward<T>(const Compute<T>*, Blocks<T>, const Compute<T>*, Compute<T>*,          \
                                               Compute<T>*, Compute<T>*, bool, Compute<T>*, Routing<Compute<T>>,      \
                                               const Compute<T>*, Compute<T>, Shape, cudaStream_t);
FASTMOD_INSTANTIATE(float)
FASTMOD_INSTANTIATE(double)
FASTMOD_INSTANTIATE(__half)
FASTMOD_INSTANTIATE(__nv_bfloat16)

}  // namespace fastmod::cuda
