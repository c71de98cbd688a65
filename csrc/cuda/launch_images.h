// Launch functions of images of experts and tasks: see launch.h.
#pragma once

#include "launch_types.h"

namespace fastmod::cuda {

// ---- norm_conv.cu, norm_conv_weight.cu, norm_conv_plain.cu, norm_conv_depthwise.cu: float, double, __half,
// __nv_bfloat16
//
// Images are [B, E, H, W, C] in memory. Each function is one launch: blocks store partial results in scratch memory,
// and the last block to finish, which a ticket tells it, adds them up in a fixed order.

struct ConvShape {
  int64_t batch;
  int experts, in, out, high, wide;  // high, wide: of x
  int kernel, stride;                // 1 or 3, 1 or 2; padded by kernel / 2
  bool shared;                       // x has no experts: [B, H, W, C]
  bool depthwise;                    // weight [E, C, 1, k, k]
  int out_high() const { return (high + stride - 1) / stride; }
  int out_wide() const { return (wide + stride - 1) / stride; }
};

// What a convolution reads: z = relu(scale * x + shift) * gate, zero outside the image. With a residual (1x1, stride 1,
// no relu, no gate, not shared, not depthwise) z = scale * x + shift + residual, which the forward also writes to
// `sum`.
template <typename T>
struct ConvInput {
  const T* x;
  const Compute<T>* scale;  // [scale_rows, in], scale_rows 1 or E; both or none
  const Compute<T>* shift;
  int scale_rows;
  const T* gate;  // [B, E, in] or null
  bool relu;
  const T* residual = nullptr;  // as x
  T* sum = nullptr;             // as x; forward only
};

// The batch norm of a convolution's output, folded along with its statistics: see batch_affine.
template <typename C>
struct BatchNorm {
  const C* weight = nullptr;  // all [E, out]; weight and bias null for 1 and 0
  const C* bias = nullptr;
  C* running_mean = nullptr;  // both or none
  C* running_var = nullptr;
  C* scale = nullptr;  // null: no batch norm
  C* shift = nullptr;
  C bessel = 1, momentum = 0, eps = 0;
  int64_t* batches = nullptr;  // a counter, which goes up by one; may be null
  int channels = 0;            // per expert; read only if there is a gap
  int64_t gap = 0;             // numbers between the weights (and biases) of one expert and the next
};

// The gradient of y with those of its mean and variance: grad + per_value * (grad_mean + 2 grad_var (y - mean)).
template <typename T>
struct ConvGrad {
  const T* grad;
  const T* y;                   // y and mean: null if neither grad_var nor grad_scale is given
  const Compute<T>* mean;       // [E, out]
  const Compute<T>* grad_mean;  // [E, out] or null
  const Compute<T>* grad_var;   // [E, out] or null
  Compute<T> per_value;         // 1 / number of values of a channel
  // Instead of grad_mean and grad_var: gradients of the batch norm's scale and shift, from which those follow; all
  // [E, out]. backward_weight also writes the gradients of the batch norm's parameters; each may be null.
  const Compute<T>* grad_scale = nullptr;
  const Compute<T>* grad_shift = nullptr;
  const Compute<T>* var = nullptr;
  const Compute<T>* scale = nullptr;
  Compute<T> eps = 0;
  Compute<T>* norm_weight = nullptr;
  Compute<T>* norm_bias = nullptr;
};

template <typename T>
Scratch norm_conv_forward_scratch(ConvShape shape);
template <typename T>
Scratch norm_conv_backward_x_scratch(ConvShape shape);
template <typename T>
Scratch norm_conv_backward_weight_scratch(ConvShape shape);

// Up to kMaxConvs independent convolutions share a launch; without tensor cores (depthwise and fp64) each has its own.
// allow_tf32: one product of tf32 instead of three.
constexpr int kMaxConvs = 4;

// mean, var [E, out], both or none; bias may be null
template <typename T>
struct ConvForward {
  ConvInput<T> input;
  const T* weight;
  const T* bias;
  T* y;
  Compute<T>* mean;
  Compute<T>* var;
  Compute<T>* scratch;
  unsigned* tickets;
  ConvShape shape;
  BatchNorm<Compute<T>> norm = {};
  int64_t weight_gap = 0;  // numbers between the filters of one expert and the next
};
template <typename T>
cudaError_t norm_conv_forward(const ConvForward<T>* convs, int count, bool allow_tf32, cudaStream_t stream);

// grad_x, grad_scale and grad_shift [scale_rows, in] (both or none), grad_gate [B, E, in]: each may be null. grad_sum:
// gradient of the forward's sum, or null; grad_residual: may be null
template <typename T>
struct ConvBackwardX {
  ConvGrad<T> grad;
  ConvInput<T> input;
  const T* weight;
  T* grad_x;
  Compute<T>* grad_scale;
  Compute<T>* grad_shift;
  T* grad_gate;
  Compute<T>* scratch;
  unsigned* tickets;
  ConvShape shape;
  const T* grad_sum = nullptr;
  T* grad_residual = nullptr;
  int64_t weight_gap = 0;
};
template <typename T>
cudaError_t norm_conv_backward_x(const ConvBackwardX<T>* convs, int count, bool allow_tf32, cudaStream_t stream);

// grad_weight and grad_bias [E, out]: each may be null. The input has no residual: its x is the sum.
template <typename T>
struct ConvBackwardWeight {
  ConvGrad<T> grad;
  ConvInput<T> input;
  T* grad_weight;
  T* grad_bias;
  Compute<T>* scratch;
  unsigned* tickets;
  ConvShape shape;
};
template <typename T>
cudaError_t norm_conv_backward_weight(const ConvBackwardWeight<T>* convs, int count, bool allow_tf32,
                                      cudaStream_t stream);

// ---- norm_sum.cu: float, double, __half, __nv_bfloat16

struct SumShape {
  int64_t batch;
  int experts, channels, pixels;
  bool shared;  // the residual has no experts: [B, pixels, channels]
};

// x [B, E, pixels, channels]; scale and shift [E, channels]; residual as x or shared, or null, its scale and shift
// both or null; gate [B, E] or null
template <typename T>
struct SumInput {
  const T* x;
  const Compute<T>* scale;
  const Compute<T>* shift;
  const T* residual;
  const Compute<T>* residual_scale;
  const Compute<T>* residual_shift;
  const T* gate;
  bool relu;
};

// out: as x, with a gate [B, pixels, channels]
template <typename T>
cudaError_t norm_sum_forward(SumInput<T> input, T* out, SumShape shape, cudaStream_t stream);

// Gradients as the inputs; each may be null. One launch, scratch as for norm_conv.
template <typename T>
struct SumGrads {
  T* x;
  Compute<T>* scale;
  Compute<T>* shift;
  T* residual;
  Compute<T>* residual_scale;
  Compute<T>* residual_shift;
  T* gate;
};
template <typename T>
Scratch norm_sum_backward_scratch(SumShape shape);
template <typename T>
cudaError_t norm_sum_backward(const T* grad, SumInput<T> input, SumGrads<T> grads, Compute<T>* scratch,
                              unsigned* tickets, SumShape shape, cudaStream_t stream);

// ---- batch_affine.cu: float, double

// All [count]; weight, bias: null for 1 and 0. scale = weight / sqrt(var + eps), shift = bias - mean * scale. Running
// statistics (both or null) move by momentum towards mean and var * bessel.
template <typename C>
cudaError_t batch_affine_forward(const C* mean, const C* var, const C* weight, const C* bias, C* running_mean,
                                 C* running_var, C* scale, C* shift, int64_t count, C bessel, C momentum, C eps,
                                 cudaStream_t stream);
template <typename C>
cudaError_t batch_affine_backward(const C* grad_scale, const C* grad_shift, const C* mean, const C* var,
                                  const C* weight, C* grad_mean, C* grad_var, C* grad_weight, C* grad_bias,
                                  int64_t count, C eps, cudaStream_t stream);

// ---- norm_pool.cu: float, double, __half, __nv_bfloat16

// x [B, E, pixels, channels]; scale and shift [E, channels]
template <typename T>
struct PoolInput {
  const T* x;
  const Compute<T>* scale;
  const Compute<T>* shift;
  bool relu;
};

// out [B, E, channels]
template <typename T>
cudaError_t norm_pool_forward(PoolInput<T> input, T* out, SumShape shape, cudaStream_t stream);

// Gradients as the inputs; each may be null. One launch, scratch as for norm_conv.
template <typename T>
struct PoolGrads {
  T* x;
  Compute<T>* scale;
  Compute<T>* shift;
};
template <typename T>
Scratch norm_pool_backward_scratch(SumShape shape);
template <typename T>
cudaError_t norm_pool_backward(const T* grad, PoolInput<T> input, PoolGrads<T> grads, Compute<T>* scratch,
                               unsigned* tickets, SumShape shape, cudaStream_t stream);
// The same for a gradient in the compute dtype.
template <typename T>
cudaError_t norm_pool_backward_wide(const Compute<T>* grad, PoolInput<T> input, PoolGrads<T> grads,
                                    Compute<T>* scratch, unsigned* tickets, SumShape shape, cudaStream_t stream);

// ---- squeeze_excite.cu: float, double, __half, __nv_bfloat16
//
// For every expert: sigmoid(norm2(weight2 relu(norm1(weight1 pooled)))), where pooled is the mean over the pixels of
// relu(scale * x + shift) and the batch norms are over the batch.

// The layers are in the compute dtype. weight1 [E, squeezed, channels], weight2 [E, channels, squeezed], with gap1 and
// gap2 numbers between the weights of one expert and the next.
template <typename C>
struct ExciteLayers {
  const C* weight1;
  const C* weight2;
  int64_t gap1, gap2;
  int squeezed;
};
// What the forward keeps for the backward: pooled [E, B, channels]; first [E, B, squeezed] and second [E, B, channels],
// both before their batch norms; mean and var [E, squeezed] and [E, channels]
template <typename C>
struct ExciteKept {
  C* pooled;
  C* first;
  C* second;
  C* mean1;
  C* var1;
  C* mean2;
  C* var2;
};
template <typename T>
bool squeeze_excite_fits(SumShape shape, int squeezed);

// gate [B, E, channels]; norm1 and norm2 with scale and shift. tickets: E, zero before and after.
template <typename T>
cudaError_t squeeze_excite_forward(PoolInput<T> input, ExciteLayers<Compute<T>> layers, BatchNorm<Compute<T>> norm1,
                                   BatchNorm<Compute<T>> norm2, ExciteKept<Compute<T>> kept, T* gate,
                                   unsigned* tickets, SumShape shape, cudaStream_t stream);

// Gradients like the parameters, all written; grad_pooled [B, E, channels] is for norm_pool_backward_wide. Reads scale,
// shift and eps of the norms. Scratch: see squeeze_excite_backward_scratch.
template <typename C>
struct ExciteGrads {
  C* weight1;
  C* norm_weight1;
  C* norm_bias1;
  C* weight2;
  C* norm_weight2;
  C* norm_bias2;
};
template <typename T>
int64_t squeeze_excite_backward_scratch(SumShape shape, int squeezed);
template <typename T>
cudaError_t squeeze_excite_backward(const T* grad, ExciteLayers<Compute<T>> layers, BatchNorm<Compute<T>> norm1,
                                    BatchNorm<Compute<T>> norm2, ExciteKept<Compute<T>> kept,
                                    ExciteGrads<Compute<T>> grads, Compute<T>* grad_pooled, Compute<T>* scratch,
                                    SumShape shape, cudaStream_t stream);

// ---- pool_linear.cu: float, double, __half, __nv_bfloat16

// x [B, high, wide, channels]; pooled x pooled regions, features [channels, pooled, pooled]
struct HeadShape {
  int64_t batch;
  int high, wide, channels, pooled, outputs;
  bool softmax;
};

// A linear layer on the means over regions of relu(scale * x + shift); scale and shift [channels] or both null; weight
// [outputs, features], bias [outputs] or null
template <typename T>
struct HeadInput {
  const T* x;
  const Compute<T>* scale;
  const Compute<T>* shift;
  const T* weight;
  const T* bias;
  bool relu;
};

// Whether the features of an image fit a block's shared memory.
template <typename T>
bool pool_linear_fits(HeadShape shape);

// out [B, outputs]
template <typename T>
cudaError_t pool_linear_forward(HeadInput<T> input, T* out, HeadShape shape, cudaStream_t stream);

// Gradients as the inputs; each may be null, scale and shift both or none. One launch, scratch as for norm_conv.
template <typename T>
struct HeadGrads {
  T* x;
  Compute<T>* scale;
  Compute<T>* shift;
  T* weight;
  T* bias;
};
template <typename T>
Scratch pool_linear_backward_scratch(HeadShape shape);
template <typename T>
cudaError_t pool_linear_backward(const T* grad, HeadInput<T> input, HeadGrads<T> grads, Compute<T>* scratch,
                                 unsigned* ticket, HeadShape shape, cudaStream_t stream);

}  // namespace fastmod::cuda
