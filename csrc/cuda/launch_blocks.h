// Launch functions of block operations: see launch.h.
#pragma once

#include "launch_types.h"

namespace fastmod::cuda {

// blocks [batch, m, d], logits [batch, m, n], output [batch, n, d]; several copies are a dimension in front.
struct Shape {
  int64_t batch, m, n, d;
  int64_t copies = 1;
};

// A pointer to device memory, if given, overrides the value beside it: neither tau nor seed needs a synchronisation.
template <typename C>
struct Routing {
  int mode;
  const C* tau;
  C tau_value;
  const int64_t* seed;
  int64_t seed_value;
  int64_t tau_step = 0, seed_step = 0;  // from copy to copy
  NumberType tau_type = kWideNumber;
};

// ---- multiplex.cu, multiplex_backward.cu: float, double, __half, __nv_bfloat16
//
// Each function is one launch for up to 65535 copies; the backward of rows too large for shared memory is one launch
// per copy. Each copy gets the values that it would get alone, including noise. If T has 16 bits, blocks and logits may
// each be fp32; then so is the gradient.

template <typename T>
cudaError_t multiplex_forward(Mixed<const T> blocks, Mixed<const T> logits, T* out, Routing<Compute<T>> routing,
                              Shape shape, cudaStream_t stream);

// grad [batch, n, d] -> grad_blocks [batch, m, d], grad_logits [batch, m, n] and grad_tau (one per copy, of
// routing.tau_type, zero unless routing.tau is a pointer). An empty batch writes nothing. Scratch as for norm_conv;
// learned: tau is a pointer.
template <typename T>
Scratch multiplex_backward_scratch(Shape shape, bool learned);
template <typename T>
cudaError_t multiplex_backward(const T* grad, Mixed<const T> blocks, Mixed<const T> logits, Mixed<T> grad_blocks,
                               Mixed<T> grad_logits, Compute<T>* grad_tau, Routing<Compute<T>> routing,
                               Compute<T>* scratch, unsigned* tickets, Shape shape, cudaStream_t stream);

// ---- gated_residual.cu: float, double, __half, __nv_bfloat16

// x, new [batch, n, d], gate [batch, n]. new_stride and gate_stride: elements from one batch row to the next, so that
// both may lie in one [batch, n*d + n] buffer, as an update FNN writes them.
struct GateShape {
  int64_t batch, n, d, new_stride, gate_stride;
};

// If T has 16 bits, each of the three may be fp32; then so is its gradient.
template <typename T>
cudaError_t gated_residual_forward(Mixed<const T> x, Mixed<const T> fresh, Mixed<const T> gate, T* out,
                                   GateShape shape, cudaStream_t stream);

// grad_fresh and grad_gate have the strides of new and gate.
template <typename T>
cudaError_t gated_residual_backward(const T* grad, Mixed<const T> x, Mixed<const T> fresh, Mixed<const T> gate,
                                    Mixed<T> grad_x, Mixed<T> grad_fresh, Mixed<T> grad_gate, GateShape shape,
                                    cudaStream_t stream);

// ---- range_penalty.cu: float, double, __half, __nv_bfloat16

// Number of partials of a tensor with `count` elements.
int64_t range_penalty_partials(int64_t count);

// The partial sums of several tensors go into one array, which range_penalty_finish (float, double) adds up.
template <typename T>
cudaError_t range_penalty_forward(const T* logits, int64_t count, Compute<T> threshold, Compute<T>* partials,
                                  cudaStream_t stream);
template <typename C>
cudaError_t range_penalty_finish(const C* partials, int64_t count, C* total, cudaStream_t stream);
template <typename T>
cudaError_t range_penalty_backward(const Compute<T>* grad, const T* logits, int64_t count, Compute<T> threshold,
                                   T* grad_logits, cudaStream_t stream);

// ---- mfnnr.cu, mfnnr_weight.cu, mfnnr_rows.cu: float, double, __half, __nv_bfloat16
//
// MFNNRs that smfr.cu cannot handle: hidden layers of any width, fp64. Activations and their gradients have the compute
// dtype, inputs and outputs of a layer have type T, parameters have type W as in smfr.cu. Each function is one launch.
// allow_tf32: one product of tf32 instead of three.

// Blocks that a layer reads: of type T or, if `wide` (under autocast), of fp32, which is rounded to T when read.
template <typename T>
struct Blocks {
  const void* first;
  bool wide;
};

// A matrix made of one part or of two side by side: [rows, first] and [rows, width - first]
template <typename T>
struct Joined {
  const Compute<T>* wide;
  Blocks<T> narrow;
  int first, width;
};

// input [batch, in], weight [out, in], bias [out] -> result [batch, out], after LeakyReLU if `leaky`, and the same in
// `copy` (may be null)
template <typename T, typename W>
cudaError_t mfnnr_linear(Joined<T> input, const W* weight, const W* bias, Compute<T>* result, T* copy, bool leaky,
                         int64_t batch, int out, bool allow_tf32, cudaStream_t stream);

// Where the gradient of a linear layer's input goes. Columns before `first` are multiplied by the slope of LeakyReLU
// according to its output `hidden` (unless null), added to `base` (unless null; it may be the same memory as wide), and
// stored to wide or, if that is null, to narrow. The other columns go to rest, if wanted.
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

constexpr int kWeightsTogether = 60, kTausTogether = 18;  // the most per launch, whose arguments are limited to 4 KB

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
  Compute<T>* tau[kTausTogether];  // the sums of tau_partials, each 0-d and of tau_type
  NumberType tau_type;
  WeightGrad<T, W> linear[kWeightsTogether];
};
template <typename T, typename W>
cudaError_t mfnnr_weights(const WeightGrads<T, W>& grads, cudaStream_t stream);

// The steps that are not matrix products: a block takes one row of the batch.
// x [batch, m*d], logits [batch, m*n] -> routed [batch, n*d]; weights [batch, m*n] is scratch memory.
template <typename T>
cudaError_t mfnnr_route(Blocks<T> x, const Compute<T>* logits, Compute<T>* weights, Compute<T>* routed,
                        Routing<Compute<T>> routing, Shape shape, cudaStream_t stream);

// routed, updated [batch, n*d + n] (new values, gate logits) -> out [batch, n*d], gate [batch, n]. The penalty over
// logits and gate logits of each row goes to partials [batch]. The last of several layers (total not null) adds up the
// partials of all `layers`, which end with its own. threshold < 0: no penalty. ticket: zero before and after.
template <typename T>
cudaError_t mfnnr_gate(const Compute<T>* routed, const Compute<T>* updated, const Compute<T>* logits, T* out, T* gate,
                       Compute<T> threshold, Compute<T>* partials, int layers, Compute<T>* total, unsigned* ticket,
                       Shape shape, cudaStream_t stream);

// grad [batch, n*d] (null: zero) -> grad_routed [batch, n*d], grad_updated [batch, n*d + n]
template <typename T>
cudaError_t mfnnr_gate_backward(const T* grad, const Compute<T>* routed, const Compute<T>* updated,
                                Compute<T>* grad_routed, Compute<T>* grad_updated, const Compute<T>* grad_penalty,
                                Compute<T> threshold, Shape shape, cudaStream_t stream);

// grad_routed [batch, n*d] -> grad_logits [batch, m*n] and, unless null, grad_x [batch, m*d] (accumulated if `add`) and
// tau_partials [batch]. weights as in mfnnr_route.
template <typename T>
cudaError_t mfnnr_route_backward(const Compute<T>* grad_routed, Blocks<T> x, const Compute<T>* logits,
                                 Compute<T>* grad_logits, Compute<T>* weights, Compute<T>* grad_x, bool add,
                                 Compute<T>* tau_partials, Routing<Compute<T>> routing, const Compute<T>* grad_penalty,
                                 Compute<T> threshold, Shape shape, cudaStream_t stream);

// ---- smfr.cu, smfr_backward.cu, smfr_weight.cu: float, __half, __nv_bfloat16
//
// A stack of MFNNRs in one launch forward and two backward, for hidden layers up to kMaxHidden. W: the type of the
// parameters, T or, under autocast, fp32, which the kernels round to T when they read it, so that nothing is cast.

constexpr int64_t kMaxHidden = 128;
constexpr int kTileRows = 16;      // batch rows per block
constexpr int kStackLayers = 18;   // the most per launch, whose arguments are limited to 4 KB
constexpr int kStackLinears = 72;

template <typename W>
struct StackLinear {
  W* weight;  // [out, in]; in smfr_backward_weight the gradients, which it writes
  W* bias;    // [out]
  int out, in;
  int routed;  // how many of the inputs are routed blocks, which come before x; 0 if inputs are not both
  int shared;  // kSharedWeight, kSharedBias: one for all copies; else each copy has its own, one after the other
};
constexpr int kSharedWeight = 1, kSharedBias = 2;

// n: output blocks. tau and seed as in Routing.
template <typename T>
struct StackLayer {
  T* out;           // [batch, n*d]
  T* logits;        // [batch, m*n]; written but not read, like gate; forward only
  T* gate;          // [batch, n]
  float* saved;     // sections [batch, width]: route layers (the last is the logits), routed, update layers; or null
  float* grads;     // sections [batch, out] of the linear layers' outputs, route first: backward only, may be null
  float* tau;       // in smfr_backward_weight the gradients of all copies, which it writes
  const int64_t* seed;
  float tau_value;
  int n, rows;              // rows: width of all sections of `saved`
  int tau_step, seed_step;  // from one copy to the next
  NumberType tau_type;
};

// Linear layers in the order of use: route and update of layer 0, of layer 1, ... m: blocks of x. Several nets of one
// architecture share a launch: then everything that is read or written per row has the copies in front, each with its
// own sections (in `saved` for the batch rounded up to a multiple of kBatchTile).
template <typename T, typename W = T>
struct Stack {
  int64_t batch;      // of each copy
  int64_t copies;
  int64_t first_copy;  // of the launch, which sets it itself
  Blocks<T> x;         // [batch, m*d]
  int64_t x_step;      // from one copy to the next; 0 if they share x
  int depth, m, d, route, update;  // route, update: number of linear layers of each such FNN
  int mode;
  bool context, precise;  // precise: three products of tf32 instead of one; two if weights have 16 bits
  float threshold;        // < 0: no penalty
  StackLayer<T> layer[kStackLayers];
  StackLinear<W> linear[kStackLinears];
};

inline int64_t stack_tiles(int64_t batch) { return (batch + kTileRows - 1) / kTileRows; }

// Whether the three launches can handle this stack on this GPU.
template <typename T, typename W>
bool stack_fits(const Stack<T, W>& stack);

// penalty: one number per copy. partials: [copies, stack_tiles]. ticket: one per copy, zero before and after.
template <typename T, typename W>
cudaError_t smfr_forward(const Stack<T, W>& stack, float* penalty, float* partials, unsigned* ticket,
                         cudaStream_t stream);

// grad_out [batch, n*d] of the last layer, grad_penalty and grad_x (of the type of x) may be null. Fills the sections
// of layer.grads, unless null, and tau_partials [copies, depth, stack_tiles] (may be null).
template <typename T, typename W>
cudaError_t smfr_backward(const Stack<T, W>& stack, const T* grad_out, const float* grad_penalty, void* grad_x,
                          float* tau_partials, cudaStream_t stream);

// layer.grads, unless null -> stack.linear; tau_partials, unless null -> layer.tau.
template <typename T, typename W>
cudaError_t smfr_backward_weight(const Stack<T, W>& stack, const float* tau_partials, cudaStream_t stream);

}  // namespace fastmod::cuda
