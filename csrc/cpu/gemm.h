// Matrix products with one operand in vectors and the other broadcast. Included once per ISA by instantiate.h.

// A(i, k) by strides: an nn.Linear weight is read as it is (forward) or transposed (backward) without packing.
template <typename T>
struct Strided {
  const T* data;
  int64_t row_stride, column_stride;
};

// What happens to the sums before they are stored.
template <typename T>
struct Epilogue {
  const T* bias = nullptr;       // [m], added unless the sums continue those in C
  bool accumulate = false;       // C += instead of C =
  bool leaky = false;            // LeakyReLU
  const T* activation = nullptr; // shaped like C: multiply by LeakyReLU'(activation)
};

template <typename T>
constexpr T kSlope = T(0.01);

// C[kRows, kVectors vectors] from A[kRows, k] and B[k, ...]; the last vector of C holds `last` columns.
template <typename T, int kRows, int kVectors>
void gemm_block(int64_t k, Strided<T> a, const T* b, int64_t b_stride, T* c, int64_t c_stride, int64_t last,
                Epilogue<T> epilogue) {
  constexpr int lanes = kLanes<T>;
  const bool partial = last < lanes;
  Vec<T> sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      const T* p = c + i * c_stride + j * lanes;
      if (epilogue.accumulate) sum[i][j] = partial && j == kVectors - 1 ? load_first(p, last) : load(p);
      else sum[i][j] = splat(epilogue.bias ? epilogue.bias[i] : T(0));
    }
  const T* a_row = a.data;
  for (int64_t p = 0; p < k; ++p) {
    Vec<T> right[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) right[j] = load(b + j * lanes);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const Vec<T> left = splat(a_row[i * a.row_stride]);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[i][j] += left * right[j];
    }
    a_row += a.column_stride;
    b += b_stride;
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      Vec<T> v = sum[i][j];
      if (epilogue.leaky) v = v > T(0) ? v : v * kSlope<T>;
      if (epilogue.activation) {
        const Vec<T> h = load(epilogue.activation + i * c_stride + j * lanes);
        v = h > T(0) ? v : v * kSlope<T>;
      }
      T* p = c + i * c_stride + j * lanes;
      if (partial && j == kVectors - 1) store_first(p, v, last);
      else store(p, v);
    }
}

// Register blocks: 6 x 4 vectors fill AVX-512's 32 registers, 6 x 2 AVX2's 16.
constexpr int kBlockRows = FASTMOD_VECTOR_BYTES == 16 ? 4 : 6;
constexpr int kBlockVectors = FASTMOD_VECTOR_BYTES == 64 ? 4 : 2;
// Depth of a block of B: 128 rows of 64 floats stay in the first-level cache.
constexpr int64_t kBlockDepth = 128;

template <typename T, int kVectors, int kRows = kBlockRows>
FASTMOD_INLINE void gemm_rows(int64_t rows, int64_t k, Strided<T> a, const T* b, int64_t b_stride, T* c,
                              int64_t c_stride, int64_t last, Epilogue<T> epilogue) {
  while (rows >= kRows) {
    gemm_block<T, kRows, kVectors>(k, a, b, b_stride, c, c_stride, last, epilogue);
    rows -= kRows;
    a.data += kRows * a.row_stride;
    c += kRows * c_stride;
    if (epilogue.bias) epilogue.bias += kRows;
    if (epilogue.activation) epilogue.activation += kRows * c_stride;
  }
  if constexpr (kRows > 1) {
    if (rows > 0) gemm_rows<T, kVectors, kRows - 1>(rows, k, a, b, b_stride, c, c_stride, last, epilogue);
  }
}

// C[m, columns] = A[m, k] B[k, columns]. B and the activation are readable up to whole vectors.
template <typename T>
void gemm(int64_t m, int64_t columns, int64_t k, Strided<T> a, const T* b, int64_t b_stride, T* c, int64_t c_stride,
          Epilogue<T> epilogue) {
  constexpr int lanes = kLanes<T>;
  for (int64_t depth = 0; depth == 0 || depth < k; depth += kBlockDepth) {
    const int64_t steps = std::min(kBlockDepth, k - depth);
    const bool final = depth + steps >= k;
    Epilogue<T> e = epilogue;
    e.accumulate |= depth > 0;
    e.leaky &= final;
    if (!final) e.activation = nullptr;
    const Strided<T> part{a.data + depth * a.column_stride, a.row_stride, a.column_stride};
    for (int64_t column = 0; column < columns;) {
      const int64_t vectors = std::min<int64_t>(kBlockVectors, (columns - column + lanes - 1) / lanes);
      const int64_t last = std::min<int64_t>(lanes, columns - column - (vectors - 1) * lanes);
      Epilogue<T> here = e;
      if (here.activation) here.activation += column;
      const T* right = b + depth * b_stride + column;
      switch (vectors) {
        case 1: gemm_rows<T, 1>(m, steps, part, right, b_stride, c + column, c_stride, last, here); break;
        case 2: gemm_rows<T, 2>(m, steps, part, right, b_stride, c + column, c_stride, last, here); break;
        case 3: gemm_rows<T, kBlockVectors == 4 ? 3 : 1>(m, steps, part, right, b_stride, c + column, c_stride, last, here); break;
        default: gemm_rows<T, kBlockVectors>(m, steps, part, right, b_stride, c + column, c_stride, last, here);
      }
      column += vectors * lanes;
    }
  }
}
