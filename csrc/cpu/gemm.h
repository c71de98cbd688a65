// Matrix products with one operand in vectors and the other broadcast.
#pragma once

#include "cpu/vec.h"

namespace fastmod::cpu::FASTMOD_ISA {

// A(i, k) by strides, so that an nn.Linear weight is read without packing, both as it is (forward) and transposed
// (backward).
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
constexpr T kSlope = T(kLeakySlope);

// What a product prefetches while it computes. kNext: what its caller needs next, one cache line of each tensor per
// step (all at once would stall). kWeights: the weights of its next rows. kNone: nothing, as everything is in cache.
enum class Prefetch { kNext, kWeights, kNone };

// Where Prefetch::kNext is. It may move past the end if there are more steps than lines.
template <typename T>
struct PrefetchCursor {
  static constexpr int64_t kLine = 64 / sizeof(T);
  const T* read;
  const T* write;
};

// C[kRows, kVectors vectors] from A[kRows, k] and B[k, ...]; the last vector of C and B holds `last` columns, which is
// a whole vector unless kPartial. kNext takes no epilogue: in a product of a few blocks it would cost more than the
// sums. kNone takes no activations.
template <typename T, int kRows, int kVectors, bool kPartial, Prefetch kPrefetch>
void gemm_block(int64_t k, Strided<T> a, const T* b, int64_t b_stride, T* c, int64_t c_stride, int64_t last,
                const Epilogue<T>& epilogue, PrefetchCursor<T>* cursor) {
  constexpr int lanes = kLanes<T>;
  constexpr bool kPlain = kPrefetch == Prefetch::kNext;
  Vec<T> sum[kRows][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j)
      sum[i][j] = splat(!kPlain && epilogue.bias && !epilogue.accumulate ? epilogue.bias[i] : T(0));
  constexpr int kNear = 8;  // rows that one pointer reaches by offsets that registers hold
  const T *a_row = a.data, *a_far = a.data + kNear * a.row_stride;
  PrefetchCursor<T> next{};
  if (kPlain) next = *cursor;
  // Weights are rarely in cache, as an optimiser has just changed them, and no hardware prefetcher predicts short
  // pieces of many rows or columns. So each step prefetches what the next block of rows reads at that step. Along rows:
  // a line of each row in turn. Down columns: the next line of this one.
  const bool along = a.column_stride == 1;
  const int64_t distance = along ? kRows * a.row_stride : 64 / int64_t(sizeof(T));
  const int64_t distance_stride = along ? a.row_stride : 0;
  for (int64_t p = 0; p < k; ++p) {
    Vec<T> right[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j)
      right[j] = kPartial && j == kVectors - 1 ? load_first(b + j * lanes, last) : load(b + j * lanes);
    if (kPlain) {
      __builtin_prefetch(next.read);
      __builtin_prefetch(next.write, 1);
      next.read += next.kLine;
      next.write += next.kLine;
    } else if (kPrefetch == Prefetch::kWeights) {
      __builtin_prefetch(a_row + distance + (p & 7) * distance_stride);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const Vec<T> left = splat((i < kNear ? a_row : a_far)[i % kNear * a.row_stride]);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[i][j] += left * right[j];
    }
    a_row += a.column_stride;
    a_far += a.column_stride;
    b += b_stride;
  }
  if (kPlain) *cursor = next;
  const auto finish = [&]<bool kAdd, bool kActivation>() FASTMOD_INLINE_LAMBDA {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        T* p = c + i * c_stride + j * lanes;
        Vec<T> v = sum[i][j];
        // Last: adding up partial sums rounds less than one long running sum.
        if (kAdd) v += kPartial && j == kVectors - 1 ? load_first(p, last) : load(p);
        if (kActivation && epilogue.leaky) v = v > T(0) ? v : v * kSlope<T>;
        if (kActivation && epilogue.activation) {
          const Vec<T> h = load(epilogue.activation + i * c_stride + j * lanes);
          v = h > T(0) ? v : v * kSlope<T>;
        }
        if (kPartial && j == kVectors - 1) store_first(p, v, last);
        else store(p, v);
      }
  };
  // Tested once per block: a short product would spend a tenth of its time on testing for every vector.
  const bool activation = kPrefetch == Prefetch::kWeights && (epilogue.leaky || epilogue.activation);
  const bool add = !kPlain && epilogue.accumulate;
  if (activation && add) finish.template operator()<true, true>();
  else if (activation) finish.template operator()<false, true>();
  else if (add) finish.template operator()<true, false>();
  else finish.template operator()<false, false>();
}

// Register blocks: 6 x 4 vectors fill AVX-512's 32 registers, 6 x 2 AVX2's 16.
constexpr int kBlockRows = FASTMOD_VECTOR_BYTES == 16 ? 4 : 6;
constexpr int kBlockVectors = FASTMOD_VECTOR_BYTES == 64 ? 4 : 2;
// Depth of a block of B: 64 rows of 64 floats stay in the first-level cache, 64 pages of a weight in the TLB.
constexpr int64_t kBlockDepth = 64;

// A product of few columns takes more rows at a time, so that enough sums are in flight to hide their latency.
constexpr int block_rows(int vectors) {
  if (FASTMOD_VECTOR_BYTES != 64) return vectors == 1 && FASTMOD_VECTOR_BYTES == 32 ? 8 : kBlockRows;
  return vectors == 1 ? 16 : vectors == 2 ? 8 : kBlockRows;
}

// `rows` rows in `blocks` blocks of kRows rows or slightly fewer each: a last block of only one or two rows would have
// too few sums in flight.
template <typename T, int kVectors, bool kPartial, Prefetch kPrefetch, int kRows>
FASTMOD_INLINE void gemm_rows(int64_t rows, int64_t blocks, int64_t k, Strided<T> a, const T* b, int64_t b_stride, T* c,
                              int64_t c_stride, int64_t last, Epilogue<T> epilogue, PrefetchCursor<T>* cursor) {
  for (; rows > blocks * (kRows - 1); --blocks) {
    gemm_block<T, kRows, kVectors, kPartial, kPrefetch>(k, a, b, b_stride, c, c_stride, last, epilogue, cursor);
    rows -= kRows;
    a.data += kRows * a.row_stride;
    c += kRows * c_stride;
    if (epilogue.bias) epilogue.bias += kRows;
    if (epilogue.activation) epilogue.activation += kRows * c_stride;
  }
  if constexpr (kRows > 1) {
    if (rows > 0)
      gemm_rows<T, kVectors, kPartial, kPrefetch, kRows - 1>(rows, blocks, k, a, b, b_stride, c, c_stride, last,
                                                             epilogue, cursor);
  }
}

// Multiplies all rows of A with columns starting at `b`: as many as the largest block has, or as are left. Returns how
// many.
template <typename T, Prefetch kPrefetch, int kVectors = kBlockVectors>
FASTMOD_INLINE int64_t gemm_panel(int64_t m, int64_t columns, int64_t k, Strided<T> a, const T* b, int64_t b_stride,
                                  T* c, int64_t c_stride, const Epilogue<T>& epilogue, PrefetchCursor<T>* cursor) {
  constexpr int lanes = kLanes<T>;
  if constexpr (kVectors > 1) {
    if (columns <= (kVectors - 1) * lanes)
      return gemm_panel<T, kPrefetch, kVectors - 1>(m, columns, k, a, b, b_stride, c, c_stride, epilogue, cursor);
  }
  constexpr int kRows = kPrefetch == Prefetch::kNext ? block_rows(kVectors) : kBlockRows;
  const int64_t last = columns - (kVectors - 1) * lanes, blocks = (m + kRows - 1) / kRows;
  if (last >= lanes)
    gemm_rows<T, kVectors, false, kPrefetch, kRows>(m, blocks, k, a, b, b_stride, c, c_stride, lanes, epilogue, cursor);
  else
    gemm_rows<T, kVectors, true, kPrefetch, kRows>(m, blocks, k, a, b, b_stride, c, c_stride, last, epilogue, cursor);
  return kVectors * lanes;
}

// C[m, columns] = A[m, k] B[k, columns]. The activation, if any, must be readable up to whole vectors.
template <typename T, Prefetch kPrefetch = Prefetch::kWeights>
void gemm(int64_t m, int64_t columns, int64_t k, Strided<T> a, const T* b, int64_t b_stride, T* c, int64_t c_stride,
          const Epilogue<T>& epilogue) {
  for (int64_t depth = 0; depth == 0 || depth < k; depth += kBlockDepth) {
    const int64_t steps = std::min(kBlockDepth, k - depth);
    const bool final = depth + steps >= k;
    Epilogue<T> here = epilogue;
    here.accumulate |= depth > 0;
    here.leaky &= final;
    if (!final) here.activation = nullptr;
    const Strided<T> part{a.data + depth * a.column_stride, a.row_stride, a.column_stride};
    const T* right = b + depth * b_stride;
    for (int64_t column = 0; column < columns;) {
      const int64_t done = gemm_panel<T, kPrefetch>(m, columns - column, steps, part, right + column, b_stride,
                                                    c + column, c_stride, here, nullptr);
      column += done;
      if (here.activation) here.activation += done;
    }
  }
}

// The same for a handful of rows and columns, without epilogue and blocking.
template <typename T>
FASTMOD_INLINE void small_gemm(int64_t m, int64_t columns, int64_t k, Strided<T> a, const T* b, int64_t b_stride, T* c,
                               int64_t c_stride, PrefetchCursor<T>* cursor) {
  for (int64_t column = 0; column < columns;)
    column += gemm_panel<T, Prefetch::kNext>(m, columns - column, k, a, b + column, b_stride, c + column, c_stride, {},
                                          cursor);
}

// C(i, j) = <row i of A, row j of B>, for long rows: transposing B would cost more than summing lanes.
template <typename T, int kRows, int kColumns>
FASTMOD_INLINE void dot_block(int64_t depth, const T* a, int64_t a_stride, const T* b, int64_t b_stride, T* c,
                              int64_t c_stride) {
  constexpr int lanes = kLanes<T>;
  Vec<T> sum[kRows][kColumns] = {};
  const auto step = [&](auto&& read, int64_t k) FASTMOD_INLINE_LAMBDA {
    Vec<T> right[kColumns];
#pragma GCC unroll 4
    for (int j = 0; j < kColumns; ++j) right[j] = read(b + j * b_stride + k);
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const Vec<T> left = read(a + i * a_stride + k);
#pragma GCC unroll 4
      for (int j = 0; j < kColumns; ++j) sum[i][j] += left * right[j];
    }
  };
  int64_t k = 0;
  for (; k + lanes <= depth; k += lanes) step([](const T* p) FASTMOD_INLINE_LAMBDA { return load(p); }, k);
  if (k < depth) step([&](const T* p) FASTMOD_INLINE_LAMBDA { return load_first(p, depth - k); }, k);
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kColumns; ++j) c[i * c_stride + j] = sum_lanes<T>(sum[i][j]);
}

template <typename T, int kRows>
FASTMOD_INLINE void dot_rows(int64_t n, int64_t depth, const T* a, int64_t a_stride, const T* b, int64_t b_stride,
                             T* c, int64_t c_stride) {
  int64_t j = 0;
  for (; j + 4 <= n; j += 4)
    dot_block<T, kRows, 4>(depth, a, a_stride, b + j * b_stride, b_stride, c + j, c_stride);
  for (; j < n; ++j) dot_block<T, kRows, 1>(depth, a, a_stride, b + j * b_stride, b_stride, c + j, c_stride);
}

template <typename T>
void dots(int64_t m, int64_t n, int64_t depth, const T* a, int64_t a_stride, const T* b, int64_t b_stride, T* c,
          int64_t c_stride) {
  constexpr int kRows = FASTMOD_VECTOR_BYTES == 64 ? 4 : 2;
  int64_t i = 0;
  for (; i + kRows <= m; i += kRows)
    dot_rows<T, kRows>(n, depth, a + i * a_stride, a_stride, b, b_stride, c + i * c_stride, c_stride);
  for (; i < m; ++i) dot_rows<T, 1>(n, depth, a + i * a_stride, a_stride, b, b_stride, c + i * c_stride, c_stride);
}

}  // namespace fastmod::cpu::FASTMOD_ISA
