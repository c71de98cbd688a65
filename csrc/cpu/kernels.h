// The CPU kernels as plain functions on raw pointers, once per instruction set; torch-free. isa.cpp picks at run time.
//
// An MFNNR works on tiles of kTile batch elements in "batch-last" layout: a row is one feature, its kTile columns are
// the batch elements. Every vector then holds one feature of many elements, so odd block sizes waste no lanes, a
// softmax over blocks needs no shuffles, and nn.Linear weights are read as they are, without packing.
#pragma once

#include <cstdint>

#include "constants.h"

namespace fastmod::cpu {

constexpr int64_t kTile = kBatchTile;

// A product with a masked weight takes so many of its rows at a time, and KernelTable::masked_columns of its columns:
// what is made of them stays in cache.
constexpr int64_t kMaskedRows = 24;

inline int64_t tiles(int64_t batch) { return (batch + kTile - 1) / kTile; }

struct Routing {
  Mode mode;
  double tau;
  int64_t seed;
};

struct BlockSizes {
  int64_t batch, m, n, d;
};

template <typename T>
struct MultiplexArgs {
  BlockSizes size;
  Routing routing;
  const T* blocks;  // [B, M, D]
  const T* logits;  // [B, M, N]
  const T* grad;    // [B, N, D], backward only
  T* out;           // [B, N, D], forward only
  T* grad_blocks;   // [B, M, D]
  T* grad_logits;   // [B, M, N]
  bool need_tau;
};

template <typename T>
struct GatedResidualArgs {
  int64_t d;
  const T *x, *fresh, *gate;  // [R, D], [R, D], [R]
  const T* grad;              // [R, D], backward only
  T* out;                     // [R, D], forward only
  T *grad_x, *grad_fresh, *grad_gate;
};

// One fully connected layer: weight [out, in] and bias [out] as in nn.Linear.
template <typename T>
struct Linear {
  const T *weight, *bias;
  T *grad_weight, *grad_bias;  // backward only
  int64_t in, out;
  int64_t row;       // first row of its output among the tile's activations
  int64_t grad_row;  // first row of the gradient of its output among the tile's gradients
};

template <typename T>
struct MfnnrArgs {
  BlockSizes size;
  Routing routing;
  bool context, need_x, need_tau;
  double threshold;         // < 0: no penalty
  const Linear<T>*route, *update;
  int64_t route_layers, update_layers;
  int64_t routed_row, rows, grad_rows;
  const T* x;               // [B, M, D]
  T *out, *logits, *gate;   // [B, N, D], [B, M, N], [B, N]
  T* saved;                 // [tiles, rows, kTile]; forward: null when nothing is kept
  double* penalty;          // [tiles]
  const T* grad_out;        // [B, N, D] or null
  double grad_penalty;
  T* grads;                 // [tiles, grad_rows, kTile]
  T* grad_x;                // [B, M, D]
  double* grad_tau;         // [tiles]
};

// A piece of one weight gradient: some columns, that is inputs, of one layer.
struct WeightGradUnit {
  bool update;
  int64_t layer, column, columns;
};

struct AdamArgs {
  double grad_scale, beta1, beta2;
  double step_size, root_scale;  // lr and 1, each with its bias correction
  double epsilon;
  bool large;  // too much for the caches
};

// Masks over `count` weights: noise of samples first .. first + samples - 1.
template <typename T>
struct MaskArgs {
  int64_t count, first, samples, seed;
  uint32_t stream;
  double tau;
  const T *logits, *weight;  // [P], the weight may be null
  T* out;                    // [S, P], forward only
  const T *grad, *base;      // [S, P], [P] or null, backward only
  T* grad_logits;            // [P]
};

// A linear layer under masks.
template <typename T>
struct MaskedLinearArgs {
  MaskArgs<T> mask;              // of the weight [out, in]
  int64_t rows, in, out;         // rows: of x per sample
  const T* x;                    // [S, rows, in], backward only
  const T* tiles;                // the same as tiles of kTile rows, each transposed [in, rows], forward only
  const T* bias;                 // [S, out] or null, forward only
  T* result;                     // [S, rows, out], forward only
  const T* grad;                 // [S, rows, out], backward only
  T *grad_logits, *grad_weight;  // [out, in] or null
  uint16_t* kept;                // [S, out, vectors of in], a bit a mask: what masked_linear_input_grad reads, or null
  bool has_nan;                  // whether a logit is NaN, for it too
};

// What one call of masked_linear_input_grad takes: all rows of a weight, some of its columns, some samples.
template <typename T>
struct MaskedPanelUnit {
  int64_t column, first_sample, end_sample;
  T* grad_x;  // [S, rows, in]
};

// A convolution of images [B, E, H, W, C] (x [B, H, W, C] where all experts share it) that normalises what it reads.
template <typename T>
struct NormConvArgs {
  int64_t batch, experts, cin, cout, high, wide, out_high, out_wide, kernel, stride;
  bool shared, depthwise, relu, winograd;
  int64_t taps() const { return winograd ? 16 : kernel * kernel; }  // matrices of packed weights
  const T *x, *scale, *shift, *gate;  // scale, shift: affine_stride from one expert to the next; may be null, like gate
  int64_t affine_stride;
  const T *weight, *bias;        // packed: see norm_conv_kernel.h; the bias [E, cout] may be null
  const T* input_weight;         // packed for the gradient of the input
  int64_t columns, input_columns;  // of the packed weights: cout and cin, up to whole vectors
  T* y;
  T *unit_mean, *unit_square;    // [B, E, cout] or null
  // backward only; whichever is not needed is null
  const T* grad;
  const T *y_read, *mean, *grad_mean, *grad_var;  // mean, grad_mean / n, 2 grad_var / n: [E, cout]
  T* grad_x;
  T *grad_scale, *grad_shift, *grad_gate;  // [B, E, cin]
  T *grad_weight, *grad_bias;              // of each part of the batch: packed as the weight; [parts, E, cout]
};

// Convolutions of an image one after the other, in inference. Value 0 is x, value i the result of layer i - 1.
template <typename T>
struct ChainLayer {
  int64_t cin, cout, kernel, stride, columns;
  bool relu, winograd;
  int64_t source, residual;  // values; residual: added before the ReLU, none if negative
  const T *weight, *bias;    // packed as for norm_conv; [E, cout] or null
  int64_t taps() const { return winograd ? 16 : kernel * kernel; }
};
// Where a value [high, wide, channels] lies in the scratch of an image: in a frame of zeros, of one row or column
// before and two after it.
struct ChainFrame {
  int64_t channels, high, wide, at;
  int64_t line() const { return (wide + 3) * channels; }
  int64_t size() const { return (high + 3) * line(); }
};
template <typename T>
struct ConvChainArgs {
  int64_t batch, experts, count, images;  // layers; images that pass each layer together, as they share its weights
  bool shared;                            // x has no experts
  const T* x;
  int64_t x_image, x_expert, x_channel, x_row, x_pixel;  // strides
  const ChainLayer<T>* layers;
  const ChainFrame* frames;  // count + 1
  int64_t frames_size;       // of the scratch of an image
  int64_t tile_channels;     // the most of a layer that goes Winograd's way
  const T* gate;             // [B, E] or null
  T* y;                      // [B, E, H, W, C], with a gate [B, H, W, C]
};

// relu(scale * x + shift + residual) of images [B, E, H * W, C], and its gated sum over experts.
template <typename T>
struct NormSumArgs {
  int64_t experts, pixels, channels;
  bool shared, relu;  // shared: the residual is [B, H * W, C]
  const T *x, *scale, *shift, *residual, *residual_scale, *residual_shift, *gate;
  T* out;  // forward only
  const T* grad;
  T *grad_x, *grad_residual;
  T *grad_scale, *grad_shift, *grad_residual_scale;  // [B, E, C] or null
  T* grad_gate;                                      // [B, E] or null
};

// The spatial mean of relu(scale * x + shift) of images [B, E, H * W, C].
template <typename T>
struct NormPoolArgs {
  int64_t experts, pixels, channels;
  bool relu;
  const T *x, *scale, *shift;
  T* out;  // [B, E, C], forward only
  const T* grad;
  T* grad_x;
  T *grad_scale, *grad_shift;  // [B, E, C]; all three may be null
};

// An inverted residual block, of images [B, T, H * W, C] with M expanded channels. Scales are those of the
// batch norms, weight / sqrt(var + eps).
template <typename T>
struct InvertedResidualArgs {
  int64_t batch, tasks, channels, expanded, high, wide;
  int64_t narrow_columns, columns;  // of packed weights: C and M, up to whole vectors
  int64_t pixels() const { return high * wide; }
  const T* x;
  const T* middle;                            // [T, C], the mean of x
  T* covariance;                              // [parts, T, C, narrow_columns]
  const T *expand, *expand_scale, *expand_bias;  // [T, C, columns], [T, M], [T, M]
  const T* taps;                              // [T, 9, columns]
  T* inner;                                   // [B, T, H * W, M], the output of the depthwise convolution
  const T *inner_scale, *inner_mean, *inner_bias;  // [T, M]
  T* pool;                                    // [3, T, B, M]
  const T* gate;                              // [T, B, M] or null
  const T* project;                           // [T, M, narrow_columns]
  T* projected;                               // [B, T, H * W, C]
  const T *scale, *mean, *bias;               // [T, C]
  T *unit_mean, *unit_square;                 // of every image: [B, T, channels]
  T* y;
  // inference only: squeeze-excite, or null
  int64_t squeezed, squeeze_columns;
  const T *squeeze, *squeeze_scale, *squeeze_bias;  // [T, M, squeeze_columns], [T, R], [T, R]
  const T *excite, *excite_scale, *excite_bias;     // [T, R, columns], [T, M], [T, M]
  // backward only
  const T* grad;
  const T *grad_factors, *inner_factors;      // [T, 3, C], [T, 3, M]: of batch norms' gradients
  const T* project_grad_weight;               // [T, C, columns]
  T* grad_project;                            // [parts, T, C, columns]
  T* inner_sums;                              // [3, T, B, M]
  const T* pool_grad;                         // [T, B, M], a pixel's share, or null
  T *grad_expand, *grad_taps;                 // [parts, T, C, columns], [parts, T, 9, columns]
  T* expand_sums;                             // [B, T, M]
  const T* expand_grad_weight;                // [T, M, narrow_columns] times the scale
  T* grad_x;                                  // or null
  const T *input_factors, *input_shift;       // [T, C, narrow_columns], [T, C]
};

// Mixtures of templates: weights [R, K] times bank [K, P].
template <typename T>
struct TemplateMixArgs {
  int64_t rows, templates, size;
  int64_t tile;  // columns of the bank that stay in cache for all rows
  const T *weights, *bank;
  T* out;         // [R, P], forward only
  const T* grad;  // [R, P], backward only
  T* grad_bank;   // or null
};

template <typename T>
struct KernelTable {
  // Scratch is owned by the caller, 64-byte aligned, of the size that the matching function tells.
  int64_t (*multiplex_scratch)(const BlockSizes&);
  void (*multiplex_forward)(const MultiplexArgs<T>&, int64_t begin, int64_t end, T* scratch);
  double (*multiplex_backward)(const MultiplexArgs<T>&, int64_t begin, int64_t end, T* scratch);  // gradient of tau
  void (*gated_residual_forward)(const GatedResidualArgs<T>&, int64_t begin, int64_t end);
  void (*gated_residual_backward)(const GatedResidualArgs<T>&, int64_t begin, int64_t end);
  double (*range_penalty_forward)(const T* logits, int64_t count, double threshold);
  void (*range_penalty_backward)(const T* logits, int64_t count, double threshold, double scale, T* grad);
  double (*square_sum)(const T* values, int64_t count);
  void (*adam_update)(const AdamArgs&, int64_t count, const T* grad, T* param, T* mean, T* square);
  void (*sample_mask_forward)(const MaskArgs<T>&, int64_t begin, int64_t end);
  void (*sample_mask_backward)(const MaskArgs<T>&, int64_t begin, int64_t end);
  void (*transpose)(const T* source, int64_t source_stride, int64_t rows, int64_t columns, T* target,
                    int64_t target_stride);
  int64_t masked_columns;
  int64_t (*masked_linear_scratch)(const MaskedLinearArgs<T>&);
  void (*masked_linear_forward)(const MaskedLinearArgs<T>&, int64_t block, T* scratch);
  // Rows of the weight block * kMaskedRows and on, masked_columns of their columns; returns whether a logit is NaN
  bool (*masked_linear_weight_grad)(const MaskedLinearArgs<T>&, int64_t block, int64_t column, T* scratch);
  int64_t (*mfnnr_scratch)(const MfnnrArgs<T>&);
  void (*mfnnr_forward)(const MfnnrArgs<T>&, int64_t tile, T* scratch);
  void (*mfnnr_backward)(const MfnnrArgs<T>&, int64_t tile, T* scratch);
  void (*mfnnr_weight_grad)(const MfnnrArgs<T>&, const WeightGradUnit&, T* scratch);
  int64_t lanes;
  void (*winograd_weights)(const T* taps, int64_t count, T* out);       // [9, count] -> [16, count]
  void (*winograd_weight_grads)(const T* grads, int64_t count, T* out);  // and back, as its gradient
  int64_t (*norm_conv_scratch)(const NormConvArgs<T>&);
  void (*norm_conv_forward)(const NormConvArgs<T>&, int64_t image, int64_t expert, T* scratch);
  void (*norm_conv_backward)(const NormConvArgs<T>&, int64_t part, int64_t begin, int64_t end, int64_t expert,
                             T* scratch);
  void (*norm_sum_forward)(const NormSumArgs<T>&, int64_t image);
  void (*norm_sum_backward)(const NormSumArgs<T>&, int64_t image);
  void (*norm_pool_forward)(const NormPoolArgs<T>&, int64_t index);  // image * experts + expert
  void (*norm_pool_backward)(const NormPoolArgs<T>&, int64_t index);
  int64_t (*inverted_residual_scratch)(const InvertedResidualArgs<T>&);
  void (*inverted_residual_mean)(const InvertedResidualArgs<T>&, int64_t image, int64_t task);
  void (*inverted_residual_covariance)(const InvertedResidualArgs<T>&, int64_t part, int64_t begin, int64_t end,
                                       int64_t task, T* scratch);
  void (*inverted_residual_expand)(const InvertedResidualArgs<T>&, int64_t image, int64_t task, T* scratch);
  void (*inverted_residual_pool)(const InvertedResidualArgs<T>&, int64_t image, int64_t task);
  void (*inverted_residual_project)(const InvertedResidualArgs<T>&, int64_t image, int64_t task, T* scratch);
  void (*inverted_residual_sum)(const InvertedResidualArgs<T>&, int64_t image, int64_t task);
  void (*inverted_residual_inference)(const InvertedResidualArgs<T>&, int64_t image, int64_t task, T* scratch);
  void (*inverted_residual_grad_sums)(const InvertedResidualArgs<T>&, int64_t image, int64_t task);
  void (*inverted_residual_project_grad)(const InvertedResidualArgs<T>&, int64_t part, int64_t begin, int64_t end,
                                         int64_t task, T* scratch);
  void (*inverted_residual_expand_grad)(const InvertedResidualArgs<T>&, int64_t part, int64_t begin, int64_t end,
                                        int64_t task, T* scratch);
  void (*inverted_residual_input_grad)(const InvertedResidualArgs<T>&, int64_t image, int64_t task, T* scratch);
  // out[rows, width] = source[rows, depth] weight[depth, columns]; sums[depth, columns] += source' grad[rows, width]
  void (*multiply)(int64_t rows, int64_t depth, const T* source, const T* weight, int64_t columns, int64_t width, T* out);
  void (*add_products)(int64_t rows, int64_t depth, const T* source, const T* grad, int64_t width, T* sums,
                       int64_t columns);
  void (*template_mix_forward)(const TemplateMixArgs<T>&, int64_t first, int64_t columns);
  int64_t (*template_mix_scratch)(const TemplateMixArgs<T>&);
  void (*template_mix_backward)(const TemplateMixArgs<T>&, int64_t first, int64_t end, T* grad_weights, T* scratch);
  // Some columns of a bank [templates, size]: `bank` and `out` point at the first of them.
  void (*cluster_penalty_forward)(const T* bank, int64_t templates, int64_t size, int64_t columns, double* sums);
  void (*cluster_penalty_backward)(const T* bank, const T* weights, int64_t templates, int64_t size, int64_t columns,
                                   T* out);
  int64_t (*conv_chain_scratch)(const ConvChainArgs<T>&);
  void (*conv_chain)(const ConvChainArgs<T>&, int64_t group, T* scratch);
  int64_t masked_panel, masked_panel_scratch;  // columns that one call takes
  void (*masked_linear_input_grad)(const MaskedLinearArgs<T>&, const MaskedPanelUnit<T>&, T* scratch);
};

struct Kernels {
  const char* isa;
  KernelTable<float> f32;
  KernelTable<double> f64;
};

template <typename T>
const KernelTable<T>& table(const Kernels& kernels) {
  if constexpr (sizeof(T) == 4) return kernels.f32;
  else return kernels.f64;
}

extern const Kernels kernels_baseline;
#if defined(__x86_64__)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

const Kernels& kernels();           // those in force
const char* best_isa();             // the best that this machine runs
bool set_isa(const char* isa);      // for tests; false when unknown or not supported here

}  // namespace fastmod::cpu
