// Launch functions of the CUDA kernels: raw pointers to contiguous device memory, no torch. Each returns the error of
// its launch. Empty work returns cudaSuccess without a launch. Nothing is allocated and nothing synchronises.
#pragma once

#include <cstdint>

#if defined(FASTMOD_CUDA_HOST)
#include "cuda_host.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#endif

#include "../constants.h"

namespace fastmod::cuda {

// The dtype a kernel computes in: fp64 for fp64, else fp32.
template <typename T>
struct ComputeOf {
  using type = float;
};
template <>
struct ComputeOf<double> {
  using type = double;
};
template <typename T>
using Compute = typename ComputeOf<T>::type;

// What a launch needs beside its arguments: numbers of the compute dtype, not initialised, and tickets, which are zero
// before and after it.
struct Scratch {
  int64_t numbers, tickets;
};

// blocks [batch, m, d], logits [batch, m, n], output [batch, n, d]
struct Shape {
  int64_t batch, m, n, d;
};

// A pointer to device memory wins over the value beside it, so that neither tau nor seed needs a synchronisation.
template <typename C>
struct Routing {
  int mode;
  const C* tau;
  C tau_value;
  const int64_t* seed;
  int64_t seed_value;
};

// ---- multiplex.cu, multiplex_backward.cu: float, double, __half, __nv_bfloat16
//
// Each function is one launch.

template <typename T>
cudaError_t multiplex_forward(const T* blocks, const T* logits, T* out, Routing<Compute<T>> routing, Shape shape,
                              cudaStream_t stream);

// grad [batch, n, d] -> grad_blocks [batch, m, d] (+ base, if not null; base may be grad_blocks itself), grad_logits
// [batch, m, n] and grad_tau (0-d, zero unless routing.tau is a pointer). grad_blocks may be null, and grad_tau where
// tau is a number. grad_penalty (0-d, may be null) adds the gradient of the range penalty over the logits. Without a
// batch nothing is written. Scratch as for norm_conv; learned: tau is a pointer.
template <typename T>
Scratch multiplex_backward_scratch(Shape shape, bool learned);
template <typename T>
cudaError_t multiplex_backward(const T* grad, const T* blocks, const T* logits, const T* base, T* grad_blocks,
                               T* grad_logits, Compute<T>* grad_tau, Routing<Compute<T>> routing,
                               const Compute<T>* grad_penalty, Compute<T> threshold, Compute<T>* scratch,
                               unsigned* tickets, Shape shape, cudaStream_t stream);

// ---- gated_residual.cu: float, double, __half, __nv_bfloat16

// x, new [batch, n, d], gate [batch, n]. new_stride and gate_stride: elements from one batch row to the next, so that
// both may lie in one [batch, n*d + n] buffer, as an update FNN writes them.
struct GateShape {
  int64_t batch, n, d, new_stride, gate_stride;
};

template <typename T>
cudaError_t gated_residual_forward(const T* x, const T* fresh, const T* gate, T* out, GateShape shape,
                                   cudaStream_t stream);

// grad may be null (zero). grad_fresh and grad_gate have the strides of new and gate. grad_penalty as above, over gate.
template <typename T>
cudaError_t gated_residual_backward(const T* grad, const T* x, const T* fresh, const T* gate, T* grad_x, T* grad_fresh,
                                    T* grad_gate, const Compute<T>* grad_penalty, Compute<T> threshold,
                                    GateShape shape, cudaStream_t stream);

// ---- range_penalty.cu: float, double, __half, __nv_bfloat16

// Number of partials of a tensor with `count` elements.
int64_t range_penalty_partials(int64_t count);

// The sums of several tensors go into one array of partials, which range_penalty_finish (float, double) adds up.
template <typename T>
cudaError_t range_penalty_forward(const T* logits, int64_t count, Compute<T> threshold, Compute<T>* partials,
                                  cudaStream_t stream);
template <typename C>
cudaError_t range_penalty_finish(const C* partials, int64_t count, C* total, cudaStream_t stream);
template <typename T>
cudaError_t range_penalty_backward(const Compute<T>* grad, const T* logits, int64_t count, Compute<T> threshold,
                                   T* grad_logits, cudaStream_t stream);

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
// Each function is one launch (fp64: one for each copy). allow_tf32: one product of tf32 instead of three. Samples begin
// at noise.first. Shapes are those of one copy.

// Layers of one shape side by side, in one launch: as torch.vmap over stacked parameters has them. Inputs are so many
// numbers apart from one copy to the next, 0 where all share one; results lie without gaps.
struct LinearCopies {
  int64_t count = 1, x = 0, grad = 0, weight = 0, logits = 0, biases = 0, seed = 0;
};

struct LinearShape {
  int64_t rows, out, in;  // rows of each sample
  LinearCopies copies = {};
};

// Of the forward, or of the gradient of x.
template <typename T>
Scratch masked_linear_scratch(LinearShape shape, int64_t samples, bool backward);

// x [samples, rows, in], weight and logits [out, in], biases [samples, out] (may be null) -> result
// [samples, rows, out]
template <typename T>
cudaError_t masked_linear_forward(const T* x, const T* weight, const T* logits, const T* biases, T* result,
                                  Compute<T>* scratch, unsigned* tickets, bool allow_tf32, LinearShape shape,
                                  MaskNoise noise, cudaStream_t stream);

// grad [samples, rows, out] -> grad_x [samples, rows, in]
template <typename T>
cudaError_t masked_linear_backward_x(const T* grad, const T* weight, const T* logits, T* grad_x, Compute<T>* scratch,
                                     unsigned* tickets, bool allow_tf32, LinearShape shape, MaskNoise noise,
                                     cudaStream_t stream);

// grad and x -> grad_weight and grad_logits [out, in], summed over the samples; each may be null.
template <typename T>
cudaError_t masked_linear_backward_weight(const T* grad, const T* x, const T* weight, const T* logits, T* grad_weight,
                                          T* grad_logits, Compute<T> tau, bool allow_tf32, LinearShape shape,
                                          MaskNoise noise, cudaStream_t stream);

// ---- masked_conv2d.cu, masked_conv2d_weight.cu: float, __half, __nv_bfloat16
//
// Part s of a batch is convolved with sample noise.first + s of the masked weight [out, in, kernel]. Each function is one
// launch. allow_tf32: one product of tf32 instead of three.

constexpr int kMaxKernel = 7;  // rows and columns of a filter

// Pairs: down and across.
struct MaskedConvShape {
  int64_t images;                                     // of each sample
  int in, out, high, wide, out_high, out_wide;        // high, wide: of x
  int kernel[2], stride[2], padding[2], dilation[2];
  int taps() const { return kernel[0] * kernel[1]; }
};

// Images [batch, channels, high, wide] as they lie in memory: how far from one to the next.
template <typename T>
struct Images {
  T* data;
  int64_t image;
  int channel, row, column;
};

template <typename T>
struct MaskedFilters {
  const T *weight, *logits;      // [out, in, kernel]
  const T *bias, *bias_logits;   // [out]; each may be null
};

// The bias has noise of its own stream.
template <typename T>
cudaError_t masked_conv2d_forward(Images<const T> x, MaskedFilters<T> filters, Images<T> result, bool allow_tf32,
                                  MaskedConvShape shape, MaskNoise noise, uint32_t bias_stream, cudaStream_t stream);
template <typename T>
cudaError_t masked_conv2d_backward_x(Images<const T> grad, MaskedFilters<T> filters, Images<T> grad_x,
                                     bool allow_tf32, MaskedConvShape shape, MaskNoise noise, cudaStream_t stream);

// Numbers that masked_conv2d_backward_weight leaves for masked_conv2d_finish.
int64_t masked_conv2d_partials(MaskedConvShape shape, int64_t samples);
template <typename T>
cudaError_t masked_conv2d_backward_weight(Images<const T> grad, Images<const T> x, float* partials, bool allow_tf32,
                                          MaskedConvShape shape, int64_t samples, cudaStream_t stream);

// As filters; each may be null.
template <typename T>
struct MaskedFilterGrads {
  T *weight, *logits, *bias, *bias_logits;
};
template <typename T>
cudaError_t masked_conv2d_finish(const float* partials, MaskedFilters<T> filters, MaskedFilterGrads<T> grads,
                                 float tau, MaskedConvShape shape, MaskNoise noise, uint32_t bias_stream,
                                 cudaStream_t stream);

// ---- norm_conv.cu, norm_conv_weight.cu, norm_conv_plain.cu: float, double, __half, __nv_bfloat16
//
// Images lie in memory as [B, E, H, W, C]. Each function is one launch: blocks leave partial results in scratch
// memory, and the one that comes last, as it finds out by a ticket, adds them up in a fixed order.

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
// no relu, no gate, not shared, not depthwise) z = scale * x + shift + residual, which the forward also writes to `sum`.
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

// Batch norm of what a convolution writes, finished with its statistics: see batch_affine.
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
  int channels = 0;            // with a gap: numbers that lie between the weights, and biases, of one expert and the next
  int64_t gap = 0;
};

// The gradient of y with those of its mean and variance: grad + per_value * (grad_mean + 2 grad_var (y - mean)).
template <typename T>
struct ConvGrad {
  const T* grad;
  const T* y;                   // y and mean: null where neither grad_var nor grad_scale is there
  const Compute<T>* mean;       // [E, out]
  const Compute<T>* grad_mean;  // [E, out] or null
  const Compute<T>* grad_var;   // [E, out] or null
  Compute<T> per_value;         // 1 / number of values of a channel
  // In place of grad_mean and grad_var the gradients of the batch norm's scale and shift, from which they follow; all
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

// Several convolutions that do not wait for one another are one launch, up to kMaxConvs at a time; without tensor cores
// (depthwise and fp64) each is one. allow_tf32: one product of tf32 instead of three.
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
  int64_t weight_gap = 0;  // numbers that lie between the filters of one expert and the next
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
// The same for a gradient that has not been rounded.
template <typename T>
cudaError_t norm_pool_backward_wide(const Compute<T>* grad, PoolInput<T> input, PoolGrads<T> grads,
                                    Compute<T>* scratch, unsigned* tickets, SumShape shape, cudaStream_t stream);

// ---- squeeze_excite.cu: float, double, __half, __nv_bfloat16
//
// Of every expert: sigmoid(norm2(weight2 relu(norm1(weight1 pooled)))), pooled the mean over the pixels of
// relu(scale * x + shift), batch norms over the batch.

// Everything of the layers is in the compute dtype. weight1 [E, squeezed, channels], weight2 [E, channels, squeezed],
// with `gap` numbers between those of one expert and the next.
template <typename C>
struct ExciteLayers {
  const C* weight1;
  const C* weight2;
  int64_t gap1, gap2;
  int squeezed;
};
// What the forward leaves for the backward: pooled and second [E, B, channels], first [E, B, squeezed], both before
// their batch norms; mean and var [E, squeezed] and [E, channels]
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

// Gradients as the parameters, all written; grad_pooled [B, E, channels], for norm_pool_backward_wide. Of the norms scale,
// shift and eps are read. Scratch: see squeeze_excite_backward_scratch.
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

// Linear layer of the means over regions of relu(scale * x + shift); scale and shift [channels] or both null; weight
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

// Whether a block's shared memory holds the features of an image.
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

// ---- entropy_penalty.cu: float, double, __half, __nv_bfloat16

// logits [rows, count] -> total; unless there are rows, it is not written. Scratch as for norm_conv.
template <typename T>
Scratch entropy_penalty_forward_scratch(int64_t rows);
template <typename T>
cudaError_t entropy_penalty_forward(const T* logits, int64_t rows, int64_t count, Compute<T>* total,
                                    Compute<T>* scratch, unsigned* tickets, cudaStream_t stream);
template <typename T>
cudaError_t entropy_penalty_backward(const Compute<T>* grad, const T* logits, int64_t rows, int64_t count,
                                     T* grad_logits, cudaStream_t stream);

// ---- template_mix.cu, template_mix_plain.cu: float, double, __half, __nv_bfloat16

constexpr int kMixSoftmax = 0, kMixTanh = 1;  // else the logits are the weights

// logits [rows, templates], bank [templates, size]
struct MixShape {
  int64_t rows, templates, size;
  int mixing;
};

// Numbers of scratch memory, not initialised.
template <typename T>
int64_t template_mix_forward_scratch(MixShape shape);
template <typename T>
int64_t template_mix_backward_scratch(MixShape shape);

// out [rows, size]. One launch; fp64, and what does not fit, two.
template <typename T>
cudaError_t template_mix_forward(const T* logits, const T* bank, T* out, Compute<T>* scratch, MixShape shape,
                                 cudaStream_t stream);
// grad [rows, size]; grad_logits and grad_bank: each may be null. Two launches; fp64, and what does not fit, four.
template <typename T>
cudaError_t template_mix_backward(const T* grad, const T* logits, const T* bank, T* grad_logits, T* grad_bank,
                                  Compute<T>* scratch, MixShape shape, cudaStream_t stream);

// ---- cluster_penalty.cu: float, double, __half, __nv_bfloat16

// bank [templates, size] -> table [templates, templates] of squared distances; without size it is not written. Scratch as
// for norm_conv.
template <typename T>
Scratch cluster_penalty_forward_scratch(int64_t templates, int64_t size);
template <typename T>
cudaError_t cluster_penalty_forward(const T* bank, double* table, Compute<T>* scratch, unsigned* tickets,
                                    int64_t templates, int64_t size, cudaStream_t stream);
// grad as table
template <typename T>
cudaError_t cluster_penalty_backward(const double* grad, const T* bank, T* grad_bank, int64_t templates, int64_t size,
                                     cudaStream_t stream);

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

// Blocks that a layer reads: of T or, if `wide`, under autocast, of fp32 that is rounded to T as it is read.
template <typename T>
struct Blocks {
  const void* first;
  bool wide;
};

// ---- mfnnr.cu, mfnnr_weight.cu, mfnnr_rows.cu: float, double, __half, __nv_bfloat16
//
// MFNNRs that smfr.cu cannot serve: hidden layers of any width, fp64. Activations and their gradients are of the compute
// dtype, what goes in and out of a layer of T, parameters of W as in smfr.cu. Each function is one launch. allow_tf32: one
// product of tf32 instead of three.

// A matrix in one part or two, side by side: [rows, first] and [rows, width - first]
template <typename T>
struct Joined {
  const Compute<T>* wide;
  Blocks<T> narrow;
  int first, width;
};

// input [batch, in], weight [out, in], bias [out] -> result [batch, out], after LeakyReLU if `leaky`, and copy (may be null)
template <typename T, typename W>
cudaError_t mfnnr_linear(Joined<T> input, const W* weight, const W* bias, Compute<T>* result, T* copy, bool leaky,
                         int64_t batch, int out, bool allow_tf32, cudaStream_t stream);

// Where the gradient of a linear layer's input goes: its columns before `first` times the slope of LeakyReLU, told by its
// output `hidden` (if not null), plus `base` (if not null; it may be wide itself), to wide or, if that is null, to narrow;
// the others, if wanted, to rest.
template <typename T>
struct InputGrad {
  const Compute<T>* hidden;  // [batch, first], as base, wide and narrow
  const Compute<T>* base;
  Compute<T>* wide;
  T* narrow;
  Compute<T>* rest;  // [batch, in - first] or null
  int first;
};
// grads [batch, out], weight [out, in]
template <typename T, typename W>
cudaError_t mfnnr_linear_backward(const Compute<T>* grads, const W* weight, InputGrad<T> result, int64_t batch, int out,
                                  int in, bool allow_tf32, cudaStream_t stream);

constexpr int kWeightsTogether = 60, kTausTogether = 18;  // what one launch takes: its arguments have 4 KB

// grads [batch, out] and input -> weight [out, in] and bias [out]
template <typename T, typename W = T>
struct WeightGrad {
  const Compute<T>* grads;
  Joined<T> input;
  W* weight;
  W* bias;
  int out;
};
template <typename T, typename W = T>
struct WeightGrads {
  int64_t batch;
  int count, taus;
  bool allow_tf32;
  const Compute<T>* tau_partials;  // [taus, batch]; null: zeros
  Compute<T>* tau[kTausTogether];  // their sums, each 0-d
  WeightGrad<T, W> linear[kWeightsTogether];
};
template <typename T, typename W>
cudaError_t mfnnr_weights(const WeightGrads<T, W>& grads, cudaStream_t stream);

// What is not a product, row by row: a block has one row of the batch.
// x [batch, m*d], logits [batch, m*n] -> routed [batch, n*d]; weights [batch, m*n] is scratch memory.
template <typename T>
cudaError_t mfnnr_route(Blocks<T> x, const Compute<T>* logits, Compute<T>* weights, Compute<T>* routed,
                        Routing<Compute<T>> routing, Shape shape, cudaStream_t stream);

// routed, updated [batch, n*d + n] (new values, gate logits) -> out [batch, n*d], gate [batch, n]. The penalty over logits
// and gate logits of each row goes to partials [batch]; the last of several layers (total not null) adds up the
// `layers` * batch that end with its own. threshold < 0: no penalty. ticket: zero before and after.
template <typename T>
cudaError_t mfnnr_gate(const Compute<T>* routed, const Compute<T>* updated, const Compute<T>* logits, T* out, T* gate,
                       Compute<T> threshold, Compute<T>* partials, int layers, Compute<T>* total, unsigned* ticket,
                       Shape shape, cudaStream_t stream);

// grad [batch, n*d] (null: zero) -> grad_routed [batch, n*d], grad_updated [batch, n*d + n]
template <typename T>
cudaError_t mfnnr_gate_backward(const T* grad, const Compute<T>* routed, const Compute<T>* updated,
                                Compute<T>* grad_routed, Compute<T>* grad_updated, const Compute<T>* grad_penalty,
                                Compute<T> threshold, Shape shape, cudaStream_t stream);

// grad_routed [batch, n*d] -> grad_logits [batch, m*n], and, if not null, grad_x [batch, m*d], which is added to what
// is there if `add`, and tau_partials [batch]. weights as in mfnnr_route.
template <typename T>
cudaError_t mfnnr_route_backward(const Compute<T>* grad_routed, Blocks<T> x, const Compute<T>* logits,
                                 Compute<T>* grad_logits, Compute<T>* weights, Compute<T>* grad_x, bool add,
                                 Compute<T>* tau_partials, Routing<Compute<T>> routing, const Compute<T>* grad_penalty,
                                 Compute<T> threshold, Shape shape, cudaStream_t stream);

// ---- smfr.cu, smfr_backward.cu, smfr_weight.cu: float, __half, __nv_bfloat16
//
// A stack of MFNNRs in one launch forward and two backward, for hidden layers up to kMaxHidden. W: of the parameters, T
// or, under autocast, fp32, which the kernels round to T as they read it: nothing is cast.

constexpr int64_t kMaxHidden = 128;
constexpr int kTileRows = 16;      // batch rows per block
constexpr int kStackLayers = 18;   // what one launch takes: its arguments have 4 KB
constexpr int kStackLinears = 72;

template <typename W>
struct StackLinear {
  W* weight;  // [out, in]; of smfr_backward_weight: the gradients, which it writes
  W* bias;    // [out]
  int out, in;
  int routed;  // how many of the inputs are routed blocks, before those of x; 0 where they are not both
  int shared;  // kSharedWeight, kSharedBias: one for all copies; else each has its own, one after the other
};
constexpr int kSharedWeight = 1, kSharedBias = 2;

// n: blocks that come out. tau and seed as in Routing.
template <typename T>
struct StackLayer {
  T* out;           // [batch, n*d]
  T* logits;        // [batch, m*n]; read by nobody, as gate: forward only
  T* gate;          // [batch, n]
  float* saved;     // sections [batch, width]: route layers (the last are the logits), routed, update layers; may be null
  float* grads;     // sections [batch, out] of the linear layers' outputs, route first: backward only, may be null
  float* tau;       // of smfr_backward_weight: its gradient, which it writes, those of the copies one after the other
  const int64_t* seed;
  float tau_value;
  int n, rows;              // rows: width of all sections of `saved`
  int tau_step, seed_step;  // from one copy to the next
};

// Linear layers in the order of use: route and update of layer 0, of layer 1, ... m: blocks of x. Several nets of one
// architecture are served together: everything that is read or written per row then has the copies in front, each with
// sections of its own (of `saved` for a batch up to a multiple of kBatchTile).
template <typename T, typename W = T>
struct Stack {
  int64_t batch;      // of each copy
  int64_t copies;
  int64_t first_copy;  // of a launch, which sets it itself
  Blocks<T> x;         // [batch, m*d]
  int64_t x_step;      // from one copy to the next; 0 where they share it
  int depth, m, d, route, update;  // route, update: linear layers of each such FNN
  int mode;
  bool context, precise;  // precise: three products of tf32 in place of one; of weights of 16 bits two
  float threshold;        // < 0: no penalty
  StackLayer<T> layer[kStackLayers];
  StackLinear<W> linear[kStackLinears];
};

inline int64_t stack_tiles(int64_t batch) { return (batch + kTileRows - 1) / kTileRows; }

// Whether the three launches can serve this stack on this GPU.
template <typename T, typename W>
bool stack_fits(const Stack<T, W>& stack);

// penalty: one number a copy. partials [copies, stack_tiles], a ticket a copy: zero before and after.
template <typename T, typename W>
cudaError_t smfr_forward(const Stack<T, W>& stack, float* penalty, float* partials, unsigned* ticket,
                         cudaStream_t stream);

// grad_out [batch, n*d] of the last layer and grad_penalty may be null, grad_x, of the type of x, too. Fills the sections
// of layer.grads, if not null, and tau_partials [copies, depth, stack_tiles] (may be null).
template <typename T, typename W>
cudaError_t smfr_backward(const Stack<T, W>& stack, const T* grad_out, const float* grad_penalty, void* grad_x,
                          float* tau_partials, cudaStream_t stream);

// layer.grads -> stack.linear, if not null; tau_partials, if not null -> layer.tau.
template <typename T, typename W>
cudaError_t smfr_backward_weight(const Stack<T, W>& stack, const float* tau_partials, cudaStream_t stream);

}  // namespace fastmod::cuda
