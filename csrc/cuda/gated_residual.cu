// gated_residual: sigmoid(gate) * new + (1 - sigmoid(gate)) * x, one gate per block of D.
#include "mixed.cuh"

namespace fastmod::cuda {
namespace {

constexpr int kThreads = 256;

template <typename T, bool kMixed>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(Operand<kMixed, const T> x, Operand<kMixed, const T> fresh, Operand<kMixed, const T> gate, T* out,
                   GateShape shape) {
  using C = Compute<T>;
  const int64_t e = global_thread();  // of x and out [batch, n, d]
  if (e >= shape.batch * shape.n * shape.d) return;
  const int64_t row = quotient(e, shape.d), b = quotient(row, shape.n), n = row - b * shape.n;
  const C logit = value_at(gate, b * shape.gate_stride + n);
  const C value = value_at(fresh, b * shape.new_stride + e - b * shape.n * shape.d);
  // sigmoid(-t) is 1 - sigmoid(t) without the cancellation
  narrow(sigmoid(logit) * value + sigmoid(-logit) * value_at(x, e), out + e);
}

// `lanes` threads (a power of two, at most a warp) share a row, so that a short row does not idle most of a warp.
template <typename T, bool kMixed>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const T* grad, Operand<kMixed, const T> x, Operand<kMixed, const T> fresh,
                    Operand<kMixed, const T> gate, Operand<kMixed, T> grad_x, Operand<kMixed, T> grad_fresh,
                    Operand<kMixed, T> grad_gate, GateShape shape, int lanes) {
  using C = Compute<T>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / lanes) + threadIdx.x / lanes;
  const int lane = threadIdx.x % lanes;
  const bool active = row < shape.batch * shape.n;  // inactive lanes stay for the shuffles
  const int64_t b = active ? quotient(row, shape.n) : 0, n = active ? row - b * shape.n : 0;
  const int64_t at_gate = b * shape.gate_stride + n, at_new = b * shape.new_stride + n * shape.d;
  const C logit = active ? value_at(gate, at_gate) : C(0);
  const C open = sigmoid(logit), shut = sigmoid(-logit);
  C total = 0;
  for (int64_t d = lane; active && d < shape.d; d += lanes) {
    const int64_t e = row * shape.d + d;
    const C g = widen(grad[e]);
    total += g * (value_at(fresh, at_new + d) - value_at(x, e));
    put_at(open * g, grad_fresh, at_new + d);
    put_at(shut * g, grad_x, e);
  }
  for (int offset = lanes / 2; offset > 0; offset /= 2) total += __shfl_xor_sync(kAllLanes, total, offset);
  if (active && lane == 0) put_at(total * open * shut, grad_gate, at_gate);
}

}  // namespace

template <typename T>
cudaError_t gated_residual_forward(Mixed<const T> x, Mixed<const T> fresh, Mixed<const T> gate, T* out,
                                   GateShape shape, cudaStream_t stream) {
  const int64_t elements = shape.batch * shape.n * shape.d;
  if (elements == 0) return cudaSuccess;
  const auto launch = [&](auto mixed) {
    constexpr bool kMixed = decltype(mixed)::value;
    return FASTMOD_LAUNCH((forward_kernel<T, kMixed>), blocks_for(elements, kThreads), kThreads, stream,
                          operand<kMixed>(x), operand<kMixed>(fresh), operand<kMixed>(gate), out, shape);
  };
  return with_mixed<T>(launch, x, fresh, gate);
}

template <typename T>
cudaError_t gated_residual_backward(const T* grad, Mixed<const T> x, Mixed<const T> fresh, Mixed<const T> gate,
                                    Mixed<T> grad_x, Mixed<T> grad_fresh, Mixed<T> grad_gate, GateShape shape,
                                    cudaStream_t stream) {
  const int64_t rows = shape.batch * shape.n;
  if (rows == 0) return cudaSuccess;
  int lanes = 1;
  while (lanes < kWarp && lanes < shape.d) lanes *= 2;
  const auto launch = [&](auto mixed) {
    constexpr bool kMixed = decltype(mixed)::value;
    return FASTMOD_LAUNCH((backward_kernel<T, kMixed>), blocks_for(rows, kThreads / lanes), kThreads, stream, grad,
                          operand<kMixed>(x), operand<kMixed>(fresh), operand<kMixed>(gate), operand<kMixed>(grad_x),
                          operand<kMixed>(grad_fresh), operand<kMixed>(grad_gate), shape, lanes);
  };
  return with_mixed<T>(launch, x, fresh, gate);
}

#define FASTMOD_INSTANTIATE(T)                                                                                      \
  template cudaError_t gated_residual_forward<T>(Mixed<const T>, Mixed<const T>, Mixed<const T>, T*, GateShape,     \
                                                 cudaStream_t);                                                     \
  template cudaError_t gated_residual_backward<T>(const T*, Mixed<const T>, Mixed<const T>, Mixed<const T>,         \
                                                  Mixed<T>, Mixed<T>, Mixed<T>, GateShape, cudaStream_t);
FASTMOD_INSTANTIATE(float)
FASTMOD_INSTANTIATE(double)
FASTMOD_INSTANTIATE(__half)
FASTMOD_INSTANTIATE(__nv_bfloat16)

}  // namespace fastmod::cuda
