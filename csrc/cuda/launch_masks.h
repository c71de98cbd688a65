// Launch functions of weight masks: see launch.h.
#pragma once

#include "launch_types.h"

namespace fastmod::cuda {

// ---- sample_mask.cu: float, double, __half, __nv_bfloat16

// Samples first .. first + samples - 1 of the noise of a stream; the seed as in Routing.
struct MaskNoise {
  int64_t first, samples;
  uint32_t stream;
  const int64_t* seed;
  int64_t seed_value;
};

// logits and weight [count] (weight null: ones) -> out [samples, count] = mask * weight
template <typename T>
cudaError_t sample_mask_forward(const T* logits, const T* weight, T* out, int64_t count, MaskNoise noise,
                                cudaStream_t stream);

// grad [samples, count] -> grad_logits [count] = base + weight * sum of grad * slope of the relaxed mask; weight and
// base may be null
template <typename T>
cudaError_t sample_mask_backward(const T* grad, const T* logits, const T* weight, const T* base, T* grad_logits,
                                 Compute<T> tau, int64_t count, MaskNoise noise, cudaStream_t stream);

// ---- masked_linear.cu, masked_linear_weight.cu, masked_linear_plain.cu: float, double, __half, __nv_bfloat16
//
// Each function is one launch (fp64: one per copy). allow_tf32: one product of tf32 instead of three. Samples begin at
// noise.first. Shapes are those of one copy. Tensors may be fp32 instead of T: see Mixed.

// Layers of one shape side by side in one launch, as from torch.vmap over stacked parameters. The members are the
// distances of inputs from one copy to the next, 0 if all share one; results have no gaps.
struct LinearCopies {
  int64_t count = 1, x = 0, grad = 0, weight = 0, logits = 0, biases = 0, seed = 0;
};

struct LinearShape {
  int64_t rows, out, in;  // rows of each sample
  LinearCopies copies = {};
};

// Scratch of the forward or, if `backward`, of the gradient of x.
template <typename T>
Scratch masked_linear_scratch(LinearShape shape, int64_t samples, bool backward);

// x [samples, rows, in], weight and logits [out, in], biases [samples, out] (may be null) -> result
// [samples, rows, out]
template <typename T>
cudaError_t masked_linear_forward(Mixed<const T> x, Mixed<const T> weight, Mixed<const T> logits,
                                  Mixed<const T> biases, T* result, Compute<T>* scratch, unsigned* tickets,
                                  bool allow_tf32, LinearShape shape, MaskNoise noise, cudaStream_t stream);

// grad [samples, rows, out] -> grad_x [samples, rows, in]
template <typename T>
cudaError_t masked_linear_backward_x(const T* grad, Mixed<const T> weight, Mixed<const T> logits, Mixed<T> grad_x,
                                     Compute<T>* scratch, unsigned* tickets, bool allow_tf32, LinearShape shape,
                                     MaskNoise noise, cudaStream_t stream);

// grad and x -> grad_weight and grad_logits [out, in], summed over the samples; each may be null.
template <typename T>
cudaError_t masked_linear_backward_weight(const T* grad, Mixed<const T> x, Mixed<const T> weight,
                                          Mixed<const T> logits, Mixed<T> grad_weight, Mixed<T> grad_logits,
                                          Compute<T> tau, bool allow_tf32, LinearShape shape, MaskNoise noise,
                                          cudaStream_t stream);

// ---- masked_conv2d.cu, masked_conv2d_weight.cu: float, __half, __nv_bfloat16
//
// Part s of a batch is convolved with sample noise.first + s of the masked weight [out, in, kernel]. Each function is
// one launch. allow_tf32: one product of tf32 instead of three. Tensors other than results and their gradients may be
// fp32 instead of T: see Mixed.

constexpr int kMaxKernel = 7;  // rows and columns of a filter

// Pairs: down and across.
struct MaskedConvShape {
  int64_t images;                                     // of each sample
  int in, out, high, wide, out_high, out_wide;        // high, wide: of x
  int kernel[2], stride[2], padding[2], dilation[2];
  int taps() const { return kernel[0] * kernel[1]; }
};

// Images [batch, channels, high, wide] in any memory layout: the members are strides.
template <typename T>
struct Images {
  Mixed<T> data;
  int64_t image;
  int channel, row, column;
};

template <typename T>
struct MaskedFilters {
  Mixed<const T> weight, logits;      // [out, in, kernel]
  Mixed<const T> bias, bias_logits;   // [out]; each may be null
};

// The bias has its own noise stream.
template <typename T>
cudaError_t masked_conv2d_forward(Images<const T> x, MaskedFilters<T> filters, Images<T> result, bool allow_tf32,
                                  MaskedConvShape shape, MaskNoise noise, uint32_t bias_stream, cudaStream_t stream);
template <typename T>
cudaError_t masked_conv2d_backward_x(Images<const T> grad, MaskedFilters<T> filters, Images<T> grad_x,
                                     bool allow_tf32, MaskedConvShape shape, MaskNoise noise, cudaStream_t stream);

// How many numbers masked_conv2d_backward_weight leaves for masked_conv2d_finish.
int64_t masked_conv2d_partials(MaskedConvShape shape, int64_t samples);
template <typename T>
cudaError_t masked_conv2d_backward_weight(Images<const T> grad, Images<const T> x, float* partials, bool allow_tf32,
                                          MaskedConvShape shape, int64_t samples, cudaStream_t stream);

// Like the filters; each may be null.
template <typename T>
struct MaskedFilterGrads {
  Mixed<T> weight, logits, bias, bias_logits;
};
template <typename T>
cudaError_t masked_conv2d_finish(const float* partials, MaskedFilters<T> filters, MaskedFilterGrads<T> grads,
                                 float tau, MaskedConvShape shape, MaskNoise noise, uint32_t bias_stream,
                                 cudaStream_t stream);

}  // namespace fastmod::cuda
