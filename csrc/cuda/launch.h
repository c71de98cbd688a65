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

// ---- multiplex.cu: float, double, __half, __nv_bfloat16

template <typename T>
cudaError_t multiplex_forward(const T* blocks, const T* logits, T* out, Routing<Compute<T>> routing, Shape shape,
                              cudaStream_t stream);

// Number of tau_partials that multiplex_backward_logits writes.
int64_t multiplex_tau_partials(Shape shape);

// grad [batch, n, d] -> grad_logits [batch, m, n]. Optional (may be null): weights [batch, m, n], the weights of the
// forward, for multiplex_backward_blocks; tau_partials, whose sum is the gradient of tau; grad_penalty (0-d), which
// adds the gradient of the range penalty over the logits.
template <typename T>
cudaError_t multiplex_backward_logits(const T* grad, const T* blocks, const T* logits, T* grad_logits,
                                      Compute<T>* weights, Compute<T>* tau_partials, Routing<Compute<T>> routing,
                                      const Compute<T>* grad_penalty, Compute<T> threshold, Shape shape,
                                      cudaStream_t stream);

// grad_blocks [batch, m, d] = weights @ grad (+ base, if not null; base may be grad_blocks itself)
template <typename T>
cudaError_t multiplex_backward_blocks(const T* grad, const Compute<T>* weights, const T* base, T* grad_blocks,
                                      Shape shape, cudaStream_t stream);

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
// Each function is one launch. allow_tf32: one product of tf32 instead of three. Samples begin at noise.first.

struct LinearShape {
  int64_t rows, out, in;  // rows of each sample
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

// What a convolution reads: z = relu(scale * x + shift) * gate, zero outside the image.
template <typename T>
struct ConvInput {
  const T* x;
  const Compute<T>* scale;  // [scale_rows, in], scale_rows 1 or E; both or none
  const Compute<T>* shift;
  int scale_rows;
  const T* gate;  // [B, E, in] or null
  bool relu;
};

// The gradient of y with those of its mean and variance: grad + per_value * (grad_mean + 2 grad_var (y - mean)).
template <typename T>
struct ConvGrad {
  const T* grad;
  const T* y;                   // y and mean: null without grad_var
  const Compute<T>* mean;       // [E, out]
  const Compute<T>* grad_mean;  // [E, out] or null
  const Compute<T>* grad_var;   // [E, out] or null
  Compute<T> per_value;         // 1 / number of values of a channel
};

template <typename T>
Scratch norm_conv_forward_scratch(ConvShape shape);
template <typename T>
Scratch norm_conv_backward_x_scratch(ConvShape shape);
template <typename T>
Scratch norm_conv_backward_weight_scratch(ConvShape shape);

// mean, var [E, out], both or none; bias may be null. allow_tf32: one product of tf32 instead of three.
template <typename T>
cudaError_t norm_conv_forward(ConvInput<T> input, const T* weight, const T* bias, T* y, Compute<T>* mean,
                              Compute<T>* var, Compute<T>* scratch, unsigned* tickets, bool allow_tf32,
                              ConvShape shape, cudaStream_t stream);
// grad_x, grad_scale and grad_shift [scale_rows, in] (both or none), grad_gate [B, E, in]: each may be null
template <typename T>
cudaError_t norm_conv_backward_x(ConvGrad<T> grad, ConvInput<T> input, const T* weight, T* grad_x,
                                 Compute<T>* grad_scale, Compute<T>* grad_shift, T* grad_gate, Compute<T>* scratch,
                                 unsigned* tickets, bool allow_tf32, ConvShape shape, cudaStream_t stream);
// grad_weight and grad_bias [E, out]: each may be null
template <typename T>
cudaError_t norm_conv_backward_weight(ConvGrad<T> grad, ConvInput<T> input, T* grad_weight, T* grad_bias,
                                      Compute<T>* scratch, unsigned* tickets, bool allow_tf32, ConvShape shape,
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

// ---- mfnnr.cu: float, double

constexpr int kMaxLinear = 8;      // linear layers per FNN in the fused kernels
constexpr int64_t kMaxHidden = 128;
constexpr int kTileRows = 16;      // batch rows per block

// Linear layers with LeakyReLU between them. Layer i: weight [width[i], in], bias [width[i]].
template <typename C>
struct Fnn {
  int linears;
  const C* weight[kMaxLinear];
  const C* bias[kMaxLinear];
  int64_t width[kMaxLinear];
  // [batch, width[i]], written if not null: after the activation for hidden layers; the last one is the output of the
  // FNN and always given.
  C* kept[kMaxLinear];
};

inline int64_t mfnnr_tiles(int64_t batch) { return (batch + kTileRows - 1) / kTileRows; }

// The whole forward is these two launches, in one stream. Scratch they share: penalty_partials [2 * mfnnr_tiles(batch)]
// and one `ticket`, neither initialised. threshold < 0: no penalty.
// x [batch, m*d] -> route.kept[last] (logits) [batch, m*n], a second copy of them (if not null), routed [batch, n*d]
template <typename C>
cudaError_t mfnnr_route(const C* x, Fnn<C> route, Routing<C> routing, C threshold, C* logits_copy, C* routed,
                        C* penalty_partials, unsigned* ticket, Shape shape, cudaStream_t stream);
// [routed ; x] (x null: no context) -> update.kept[last] [batch, n*d + n], out [batch, n*d], gate [batch, n], and the
// penalty of both launches (zero if threshold < 0)
template <typename C>
cudaError_t mfnnr_update(const C* x, const C* routed, Fnn<C> update, C threshold, C* out, C* gate,
                         C* penalty_partials, unsigned* ticket, C* penalty, Shape shape, cudaStream_t stream);

// grad *= derivative of LeakyReLU, told from its output `hidden`; in place, on a buffer the caller owns.
template <typename C>
cudaError_t leaky_backward(C* grad, const C* hidden, int64_t count, cudaStream_t stream);

// ---- smfr.cu, smfr_backward.cu, smfr_weight.cu: float, __half, __nv_bfloat16
//
// A stack of MFNNRs in one launch forward and two backward, for hidden layers up to kMaxHidden.

constexpr int kStackLayers = 20;   // what one launch takes: its arguments have 4 KB
constexpr int kStackLinears = 96;

template <typename T>
struct StackLinear {
  T* weight;  // [out, in]; of smfr_backward_weight: the gradients, which it writes
  T* bias;    // [out]
  int out, in;
};

// n: blocks that come out. tau and seed as in Routing.
template <typename T>
struct StackLayer {
  T* out;           // [batch, n*d]
  T* logits;        // [batch, m*n]; read by nobody, as gate: forward only
  T* gate;          // [batch, n]
  float* saved;     // sections [batch, width]: route layers (the last are the logits), routed, update layers; may be null
  float* grads;     // sections [batch, out] of the linear layers' outputs, route first: backward only, may be null
  float* tau;       // of smfr_backward_weight: its gradient, which it writes
  const int64_t* seed;
  int64_t seed_value;
  float tau_value;
  int n;
};

// Linear layers in the order of use: route and update of layer 0, of layer 1, ... m: blocks of x.
template <typename T>
struct Stack {
  int64_t batch;
  const T* x;  // [batch, m*d]
  int depth, m, d, route, update;  // route, update: linear layers of each such FNN
  int mode;
  bool context, precise;  // precise: three products of tf32 in place of one; of weights of 16 bits two
  float threshold;        // < 0: no penalty
  StackLayer<T> layer[kStackLayers];
  StackLinear<T> linear[kStackLinears];
};

inline int64_t stack_tiles(int64_t batch) { return (batch + kTileRows - 1) / kTileRows; }

// Whether the three launches can serve this stack on this GPU.
template <typename T>
bool stack_fits(const Stack<T>& stack);

// penalty: 0-d. partials [stack_tiles], ticket: zero before and after.
template <typename T>
cudaError_t smfr_forward(const Stack<T>& stack, float* penalty, float* partials, unsigned* ticket,
                         cudaStream_t stream);

// grad_out [batch, n*d] of the last layer and grad_penalty may be null, grad_x too. Fills the sections of layer.grads,
// if not null, and tau_partials [depth, stack_tiles] (may be null).
template <typename T>
cudaError_t smfr_backward(const Stack<T>& stack, const T* grad_out, const float* grad_penalty, T* grad_x,
                          float* tau_partials, cudaStream_t stream);

// layer.grads -> stack.linear, if not null; tau_partials, if not null -> layer.tau.
template <typename T>
cudaError_t smfr_backward_weight(const Stack<T>& stack, const float* tau_partials, cudaStream_t stream);

}  // namespace fastmod::cuda
