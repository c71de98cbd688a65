// Products with masked weights. A piece of the weight is masked in cache and multiplied immediately, so that there is
// never a masked copy of the whole weight.
#pragma once

#include "cpu/sample_mask_kernel.h"

namespace fastmod::cpu {

// Rows of the weight that a product takes at a time, with MaskedLinearKernels::columns of its columns, so that the
// masked piece stays in cache.
constexpr int64_t kMaskedRows = 24;

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
  uint16_t* kept;                // [S, out, vectors of in], a bit per mask, for masked_linear_input_grad, or null
  bool has_nan;                  // whether a logit is NaN, for masked_linear_input_grad as well
};

// The work of one call of masked_linear_input_grad: all rows of a weight, some of its columns, some samples.
template <typename T>
struct MaskedPanelUnit {
  int64_t column, first_sample, end_sample;
  T* grad_x;  // [S, rows, in]
};

template <typename T>
struct MaskedLinearKernels {
  int64_t columns;
  int64_t (*scratch)(const MaskedLinearArgs<T>&);
  void (*forward)(const MaskedLinearArgs<T>&, int64_t block, T* scratch);
  // Handles the weight's rows from block * kMaskedRows on, `columns` of their columns; returns whether a logit is NaN.
  bool (*weight_grad)(const MaskedLinearArgs<T>&, int64_t block, int64_t column, T* scratch);
  int64_t panel, panel_scratch;  // columns per call
  void (*input_grad)(const MaskedLinearArgs<T>&, const MaskedPanelUnit<T>&, T* scratch);
};

}  // namespace fastmod::cpu

#ifdef FASTMOD_ISA

#include "cpu/gemm.h"

namespace fastmod::cpu::FASTMOD_ISA {

// Columns of a piece: whole batches of noise, but few enough that x and its gradient also fit a second-level cache of
// 512 KiB.
constexpr int64_t kMaskedColumns = FASTMOD_VECTOR_BYTES == 64 ? 4 * kNoiseBatch : 192;
static_assert(kMaskedColumns % kNoiseBatch == 0);

// A piece of the weight, at most kMaskedRows x kMaskedColumns, under one sample after the other.
template <typename T>
struct MaskedPiece {
  // A whole number of cache lines but not a power of two of them: rows would then compete for the same cache sets.
  static constexpr int64_t kStride = kMaskedColumns + 64 / sizeof(T);
  static constexpr int64_t kSize = kMaskedRows * kStride;
  const MaskedLinearArgs<T>& args;
  const NoiseKeys keys;
  int64_t first, count, column, columns;
  int32_t* off;
  T *decay, *masked, *outer;        // outer: the gradient of the masked piece
  T *grad_logits, *grad_weight;     // summed here, in cache
  bool has_nan = false;

  static constexpr int64_t kScratch = 6 * kSize;
  MaskedPiece(const MaskedLinearArgs<T>& args_, T* scratch)
      : args(args_), keys(args.mask.seed, args.mask.stream), off(reinterpret_cast<int32_t*>(scratch)),
        decay(scratch + kSize), masked(scratch + 2 * kSize), outer(scratch + 3 * kSize),
        grad_logits(args.grad_logits ? scratch + 4 * kSize : nullptr),
        grad_weight(args.grad_weight ? scratch + 5 * kSize : nullptr) {}

  void move_to(int64_t first_, int64_t count_, int64_t column_, int64_t columns_, bool masks, bool slopes) {
    first = first_, count = count_, column = column_, columns = columns_;
    has_nan = false;
    for (int64_t r = 0; r < count; ++r)
      has_nan |= prepare_masks(args.mask.logits + place(r), columns, masks ? off + r * kStride : nullptr,
                                  slopes ? decay + r * kStride : nullptr);
  }

  // Offset of a row of the piece in the weight.
  int64_t place(int64_t r) const { return (first + r) * args.in + column; }

  // Draws the masks of a sample: writes the masked piece if `masks`, and adds what the sample contributes to the
  // gradients. Each sample prefetches its share of the piece that begins `ahead` weights later.
  void draw(int64_t sample, bool masks, int64_t ahead) const {
    for (int64_t r = 0; r < count; ++r) {
      MaskRun<T> run{.sample = sample, .begin = place(r), .count = columns, .off = off + r * kStride,
                     .decay = decay + r * kStride, .has_nan = has_nan, .weight = args.mask.weight + place(r)};
      run.masked = masks ? masked + r * kStride : nullptr;
      if (args.kept) {
        const int64_t vectors = (args.in + kLanes<T> - 1) / kLanes<T>;
        run.kept = args.kept + (sample * args.out + first + r) * vectors + column / kLanes<T>;
      }
      run.grad = outer + r * kStride;
      run.grad_logits = grad_logits ? grad_logits + r * kStride : nullptr;
      run.grad_weight = grad_weight ? grad_weight + r * kStride : nullptr;
      if (const int64_t next = place(r) + ahead; next < args.mask.count) {
        const int64_t part = sample * columns / args.mask.samples;
        run.next_logits = args.mask.logits + next + part;
        run.next_weight = args.mask.weight + next + part;
      }
      mask_run<T>(args.mask, keys, run);
    }
  }

  void clear_gradients() const {
    for (T* sum : {grad_logits, grad_weight})
      if (sum) std::fill_n(sum, count * kStride, T(0));
  }

  void store_gradients() const {
    for (int64_t r = 0; r < count; ++r) {
      const T *sum = grad_logits + r * kStride, *weight = args.mask.weight + place(r);
      for (int64_t i = 0; grad_logits && i < columns; ++i) args.grad_logits[place(r) + i] = sum[i] * weight[i];
      if (grad_weight) std::copy_n(grad_weight + r * kStride, columns, args.grad_weight + place(r));
    }
  }
};

// Room for a piece, and for the results of its rows (or their gradient): [kMaskedRows, rows of the tile] for every
// sample and tile.
template <typename T>
int64_t masked_linear_scratch(const MaskedLinearArgs<T>& args) {
  return MaskedPiece<T>::kScratch + kMaskedRows * args.mask.samples * args.rows;
}

// Multiplies the weight's rows from block * kMaskedRows on with all of x.
template <typename T>
void masked_linear_forward(const MaskedLinearArgs<T>& args, int64_t block, T* scratch) {
  MaskedPiece<T> piece(args, scratch);
  T* results = scratch + MaskedPiece<T>::kScratch;
  const int64_t first = block * kMaskedRows, count = std::min(kMaskedRows, args.out - first);
  for (int64_t column = 0; column == 0 || column < args.in; column += kMaskedColumns) {
    const bool last = column + kMaskedColumns >= args.in;
    piece.move_to(first, count, column, std::min(kMaskedColumns, args.in - column), true, false);
    for (int64_t s = 0; s < args.mask.samples; ++s) {
      piece.draw(s, true, last ? kMaskedRows * args.in - column : kMaskedColumns);
      const Epilogue<T> epilogue{.bias = args.bias ? args.bias + s * args.out + first : nullptr,
                                 .accumulate = column > 0};
      for (int64_t row = 0; row < args.rows; row += kTile) {
        const int64_t width = std::min(kTile, args.rows - row), before = s * args.rows + row;
        gemm<T, Prefetch::kNone>(count, width, piece.columns, {piece.masked, piece.kStride, 1},
                                args.tiles + before * args.in + column * width, width, results + before * kMaskedRows,
                                width, epilogue);
      }
    }
  }
  for (int64_t s = 0; s < args.mask.samples; ++s)
    for (int64_t row = 0; row < args.rows; row += kTile) {
      const int64_t width = std::min(kTile, args.rows - row), before = s * args.rows + row;
      transpose(results + before * kMaskedRows, width, count, width, args.result + before * args.out + first, args.out);
    }
}

// Gradients of some rows and columns of logits and weight, and the masks for the gradient of x.
template <typename T>
bool masked_linear_weight_grad(const MaskedLinearArgs<T>& args, int64_t block, int64_t column, T* scratch) {
  MaskedPiece<T> piece(args, scratch);
  T* grads = scratch + MaskedPiece<T>::kScratch;
  const int64_t first = block * kMaskedRows, count = std::min(kMaskedRows, args.out - first);
  const bool outer = piece.grad_logits || piece.grad_weight;
  piece.move_to(first, count, column, std::min(kMaskedColumns, args.in - column), args.kept || args.grad_weight,
                args.grad_logits);
  piece.clear_gradients();
  // Copied side by side: in place, every row is on a page of its own, and there are more pages than TLB entries.
  for (int64_t row = 0; outer && row < args.mask.samples * args.rows; ++row)
    std::copy_n(args.grad + row * args.out + first, count, grads + row * kMaskedRows);
  for (int64_t s = 0; s < args.mask.samples; ++s) {
    if (outer)
      gemm<T, Prefetch::kNone>(count, piece.columns, args.rows, {grads + s * args.rows * kMaskedRows, 1, kMaskedRows},
                              args.x + s * args.rows * args.in + column, args.in, piece.outer, piece.kStride, {});
    piece.draw(s, false, kMaskedRows * args.in);
  }
  piece.store_gradients();
  return piece.has_nan;
}

// Columns of x per product, and rows of the weight that are masked for it at a time.
template <typename T>
constexpr int64_t kMaskedPanel = kBlockVectors * kLanes<T>;
constexpr int64_t kMaskedDepth = 2 * kBlockDepth;

// Only the gradient of x: the result's gradient times the weight under the masks that masked_linear_weight_grad kept.
template <typename T>
void masked_linear_input_grad(const MaskedLinearArgs<T>& args, const MaskedPanelUnit<T>& unit, T* scratch) {
  constexpr int64_t lanes = kLanes<T>, kWidth = kMaskedPanel<T>, kRowsAhead = 16;
  const int64_t columns = std::min(kWidth, args.in - unit.column), vectors = (args.in + lanes - 1) / lanes;
  for (int64_t row = 0; row < args.out; row += kMaskedDepth) {
    const int64_t depth = std::min(kMaskedDepth, args.out - row);
    for (int64_t s = unit.first_sample; s < unit.end_sample; ++s) {
      for (int64_t r = row; r < row + depth; ++r) {
        const int64_t place = r * args.in + unit.column;
        const uint16_t* kept = args.kept + (s * args.out + r) * vectors + unit.column / lanes;
        // A few lines of every row, each on a page of its own: no hardware prefetcher predicts them.
        if (s == unit.first_sample && r + kRowsAhead < args.out)
          prefetch<0>(args.mask.weight + place + kRowsAhead * args.in, columns);
        by_vectors<T>(columns, [&](int64_t i, auto left) FASTMOD_INLINE_LAMBDA {
          Vec<T> masked = load_lanes(args.mask.weight + place + i, left) * ones_where<T>(kept[i / lanes]);
          if (args.has_nan) {
            const Vec<T> logit = load_lanes(args.mask.logits + place + i, left);
            masked = logit == logit ? masked : logit;
          }
          store(scratch + (r - row) * kWidth + i, masked);
        });
      }
      gemm<T, Prefetch::kNone>(args.rows, columns, depth, {args.grad + s * args.rows * args.out + row, args.out, 1},
                              scratch, kWidth, unit.grad_x + s * args.rows * args.in + unit.column, args.in,
                              {.accumulate = row > 0});
    }
  }
}

FASTMOD_KERNELS(MaskedLinearKernels, .columns = kMaskedColumns, .scratch = masked_linear_scratch<T>,
                .forward = masked_linear_forward<T>, .weight_grad = masked_linear_weight_grad<T>,
                .panel = kMaskedPanel<T>, .panel_scratch = kMaskedPanel<T> * kMaskedDepth,
                .input_grad = masked_linear_input_grad<T>);

}  // namespace fastmod::cpu::FASTMOD_ISA

#else

#include "checks.h"

namespace fastmod {

// Whether several layers run side by side, as under torch.vmap: then every tensor has one more dimension in front,
// except a seed that all layers share.
inline bool stacked_layers(const at::Tensor& weight) { return weight.dim() == 3; }

inline void check_masked_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& logits,
                                 const std::optional<at::Tensor>& biases, const at::Tensor& seed, int64_t samples,
                                 int64_t first, const LowType& low) {
  const bool stacked = stacked_layers(weight);
  TORCH_CHECK_VALUE(x.dim() >= (stacked ? 3 : 2) && (stacked || weight.dim() == 2) && x.size(-1) == weight.size(-1) &&
                        (!stacked || x.size(0) == weight.size(0)),
                    "expected x [B, ..., in] and weight [out, in], got ", x.sizes(), " and ", weight.sizes());
  check_float(x, "x");
  check_mixed(x, weight, low, "weight");
  check_mixed(x, logits, low, "logits");
  TORCH_CHECK_VALUE(logits.sizes() == weight.sizes(), "logits: expected the shape of weight, ", weight.sizes(),
                    ", got ", logits.sizes());
  const int64_t batch = x.size(stacked ? 1 : 0), out = weight.size(-2);
  TORCH_CHECK_VALUE(samples >= 1 && batch % samples == 0, "x: expected a batch that is a multiple of ", samples,
                    " samples, got ", batch);
  const bool seeds = stacked && seed.dim() == 1;
  TORCH_CHECK_VALUE(!seeds || seed.size(0) == weight.size(0), "seed: expected one a layer, ", weight.size(0), ", got ",
                    seed.size(0));
  check_mask_noise(seeds && seed.size(0) > 0 ? seed.select(0, 0) : seed, first, samples, 0);
  if (!biases) return;
  check_mixed(x, *biases, low, "biases");
  TORCH_CHECK_VALUE(biases->dim() == (stacked ? 3 : 2) && (!stacked || biases->size(0) == weight.size(0)) &&
                        biases->size(-2) == samples && biases->size(-1) == out,
                    "biases: expected [", samples, ", ", out, "], got ", biases->sizes());
}

inline void check_masked_linear_grad(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight,
                                      const at::Tensor& logits, const at::Tensor& seed, int64_t samples, int64_t first,
                                      double tau, const LowType& low) {
  check_masked_linear(x, weight, logits, std::nullopt, seed, samples, first, low);
  check_grad(x, grad, low);
  TORCH_CHECK_VALUE(tau > 0, "tau: expected a number > 0, got ", tau);
  const int64_t batch = leading_size(x, 1), out = weight.size(-2);
  TORCH_CHECK_VALUE(grad.dim() == x.dim() && grad.numel() == batch * out && grad.size(-1) == out &&
                        grad.size(0) == x.size(0),
                    "grad: expected [B, ..., ", out, "], got ", grad.sizes());
}

}  // namespace fastmod

#endif
