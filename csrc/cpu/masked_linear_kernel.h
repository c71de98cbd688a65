// Products with masked weights: a piece of the weight is masked in cache and multiplied at once, so that no masked copy
// of the whole ever exists. Included once per ISA by instantiate.h.

// Columns of a piece: whole batches of noise, and few enough that a second-level cache of 512 KiB has room for x and
// its gradient too.
constexpr int64_t kMaskedColumns = FASTMOD_VECTOR_BYTES == 64 ? 4 * kNoiseBatch : 192;
static_assert(kMaskedColumns % kNoiseBatch == 0);

// A piece of the weight under one sample after the other: kMaskedRows rows of kMaskedColumns columns at most.
template <typename T>
struct MaskedPiece {
  // Whole cache lines, and not a power of two of them: rows that lie so apart would meet in the same few places.
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

  // Where a row of the piece begins in the weight.
  int64_t place(int64_t r) const { return (first + r) * args.in + column; }

  // The piece under the masks of a sample, if wanted, and what the sample adds to the gradients. Each sample asks for its
  // share of the piece that begins `ahead` weights later.
  void draw(int64_t sample, bool masks, int64_t ahead) const {
    for (int64_t r = 0; r < count; ++r) {
      MaskRun<T> run{.sample = sample, .begin = place(r), .count = columns, .off = off + r * kStride,
                     .decay = decay + r * kStride, .has_nan = has_nan, .weight = args.mask.weight + place(r)};
      run.masked = masks ? masked + r * kStride : nullptr;
      run.grad = outer + r * kStride;
      run.grad_logits = grad_logits ? grad_logits + r * kStride : nullptr;
      run.grad_weight = grad_weight ? grad_weight + r * kStride : nullptr;
      if (const int64_t soon = place(r) + ahead; soon < args.mask.count) {
        const int64_t part = sample * columns / args.mask.samples;
        run.soon_logits = args.mask.logits + soon + part;
        run.soon_weight = args.mask.weight + soon + part;
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

// A piece, and of its rows the results, for every sample and tile [kMaskedRows, rows of the tile], or their gradient
template <typename T>
int64_t masked_linear_scratch(const MaskedLinearArgs<T>& args) {
  return MaskedPiece<T>::kScratch + kMaskedRows * args.mask.samples * args.rows;
}

// Rows block * kMaskedRows and on of the weight, against all of x.
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
        gemm<T, Asks::kNothing>(count, width, piece.columns, {piece.masked, piece.kStride, 1},
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

template <typename T>
void masked_linear_backward(const MaskedLinearArgs<T>& args, const MaskedLinearUnit<T>& unit, T* scratch) {
  MaskedPiece<T> piece(args, scratch);
  T* grads = scratch + MaskedPiece<T>::kScratch;
  for (int64_t first = unit.first_row; first < unit.end_row; first += kMaskedRows) {
    const int64_t count = std::min(kMaskedRows, unit.end_row - first);
    piece.move_to(first, count, unit.column, unit.columns, unit.grad_x || args.grad_weight, args.grad_logits);
    piece.clear_gradients();
    // Side by side: as they are, every row has a page of its own, more than the TLB knows at a time.
    for (int64_t row = 0; row < args.mask.samples * args.rows; ++row)
      std::copy_n(args.grad + row * args.out + first, count, grads + row * kMaskedRows);
    for (int64_t s = 0; s < args.mask.samples; ++s) {
      const T* grad = grads + s * args.rows * kMaskedRows;
      const int64_t x = s * args.rows * args.in + unit.column;
      if (piece.grad_logits || piece.grad_weight)
        gemm<T, Asks::kNothing>(count, unit.columns, args.rows, {grad, 1, kMaskedRows}, args.x + x, args.in,
                                piece.outer, piece.kStride, {});
      piece.draw(s, unit.grad_x, kMaskedRows * args.in);
      if (unit.grad_x)
        gemm<T, Asks::kNothing>(args.rows, unit.columns, count, {grad, kMaskedRows, 1}, piece.masked, piece.kStride,
                                unit.grad_x + x, args.in, {.accumulate = first > unit.first_row});
    }
    piece.store_gradients();
  }
}
