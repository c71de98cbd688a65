// What the convolutions on tensor cores (norm_conv.cu) and the plain ones (norm_conv_plain.cu) share.
#pragma once

#include "common.cuh"

namespace fastmod::cuda {

template <typename C>
__device__ inline C rectified(C value) {
  return value <= C(0) ? C(0) : value;  // a NaN stays a NaN
}

// As T would hold it.
template <typename T>
__device__ inline Compute<T> rounded(Compute<T> value) {
  T held;
  narrow(value, &held);
  return widen(held);
}

// Scale, shift and gate of one channel; ones and zeros where there are none.
template <typename C>
struct Affine {
  C scale = 1, shift = 0;
  __device__ C operator()(C x, bool relu) const {
    const C value = scale * x + shift;
    return relu ? rectified(value) : value;
  }
};
template <typename T>
__device__ inline Affine<Compute<T>> affine_of(const ConvInput<T>& input, int in, int expert, int channel) {
  if (!input.scale) return {};
  const int64_t at = static_cast<int64_t>(input.scale_rows == 1 ? 0 : expert) * in + channel;
  return {input.scale[at], input.shift[at]};
}
template <typename T>
__device__ inline Compute<T> gate_of(const ConvInput<T>& input, const ConvShape& shape, int64_t b, int expert,
                                     int channel) {
  return input.gate ? widen(input.gate[(b * shape.experts + expert) * shape.in + channel]) : Compute<T>(1);
}

// What is added to the gradient of y for its mean and variance: offset + slope * (y - mean).
template <typename C>
struct StatisticsGrad {
  C offset = 0, slope = 0, mean = 0;
};
template <typename T>
__device__ inline StatisticsGrad<Compute<T>> statistics_grad(const ConvGrad<T>& grad, int64_t channel) {
  StatisticsGrad<Compute<T>> result;
  if (grad.grad_mean) result.offset = grad.grad_mean[channel] * grad.per_value;
  if (grad.grad_var) {
    result.slope = Compute<T>(2) * grad.grad_var[channel] * grad.per_value;
    result.mean = grad.mean[channel];
  }
  return result;
}

// Count, mean and sum of squared deviations, joined by the formula of Chan, Golub and LeVeque: no cancellation.
template <typename C>
struct Moments {
  C count = 0, mean = 0, squares = 0;
  __device__ void join(C other_count, C other_mean, C other_squares) {
    const C total = count + other_count, part = other_count / total, apart = other_mean - mean;
    squares += other_squares + apart * apart * count * part;
    mean += apart * part;
    count = total;
  }
};

// Written by other blocks while this one ran.
template <typename C>
__device__ inline C fresh(const C* address) {
  return *static_cast<const volatile C*>(address);
}

// Whether this block is the last of `arrivals` to come here: then all that the others wrote before can be read. Leaves
// the ticket as it was before the first.
__device__ inline bool last_to_arrive(unsigned* ticket, unsigned arrivals) {
  FASTMOD_SHARED(unsigned, place, 1);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    place[0] = atomicInc(ticket, arrivals - 1);
  }
  __syncthreads();
  const bool last = place[0] + 1 == arrivals;
  if (last) __threadfence();
  return last;
}

// ---- norm_conv_plain.cu: the same launches, any dtype, no tensor cores

namespace plain {

template <typename T>
int64_t forward_scratch(const ConvShape& shape);
template <typename T>
int64_t backward_x_scratch(const ConvShape& shape);
template <typename T>
int64_t backward_weight_scratch(const ConvShape& shape);
template <typename T>
cudaError_t forward(const ConvInput<T>& input, const T* weight, const T* bias, T* y, Compute<T>* mean,
                    Compute<T>* var, Compute<T>* scratch, unsigned* tickets, const ConvShape& shape,
                    cudaStream_t stream);
template <typename T>
cudaError_t backward_x(const ConvGrad<T>& grad, const ConvInput<T>& input, const T* weight, T* grad_x,
                       Compute<T>* grad_scale, Compute<T>* grad_shift, T* grad_gate, Compute<T>* scratch,
                       unsigned* tickets, const ConvShape& shape, cudaStream_t stream);
template <typename T>
cudaError_t backward_weight(const ConvGrad<T>& grad, const ConvInput<T>& input, T* grad_weight, T* grad_bias,
                            Compute<T>* scratch, unsigned* tickets, const ConvShape& shape, cudaStream_t stream);

}  // namespace plain

}  // namespace fastmod::cuda
