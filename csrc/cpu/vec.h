// Vectors of one instruction set: loads, stores, exp, log, transposes.
#pragma once

#include "cpu/kernels.h"

namespace fastmod::cpu {

template <typename T>
struct VectorKernels {
  int64_t lanes;
  void (*transpose)(const T* source, int64_t source_stride, int64_t rows, int64_t columns, T* target,
                    int64_t target_stride);
};

}  // namespace fastmod::cpu

#ifdef FASTMOD_ISA

namespace fastmod::cpu::FASTMOD_ISA {

template <typename Table>
extern const Table filled;  // see FASTMOD_KERNELS
template <typename Table>
const Table& compiled() {
  return filled<Table>;
}

template <typename T>
struct Vector {
  typedef T type __attribute__((vector_size(FASTMOD_VECTOR_BYTES)));
  typedef T unaligned __attribute__((vector_size(FASTMOD_VECTOR_BYTES), aligned(alignof(T)), may_alias));
  static constexpr int size = FASTMOD_VECTOR_BYTES / sizeof(T);
};
template <typename T>
using Vec = typename Vector<T>::type;
template <typename T>
constexpr int kLanes = Vector<T>::size;

typedef int32_t IntVec __attribute__((vector_size(FASTMOD_VECTOR_BYTES)));

template <typename T>
FASTMOD_INLINE Vec<T> load(const T* p) {
  return *reinterpret_cast<const typename Vector<T>::unaligned*>(p);
}
template <typename T>
FASTMOD_INLINE void store(T* p, Vec<T> v) {
  *reinterpret_cast<typename Vector<T>::unaligned*>(p) = v;
}
// Stores past the caches; the address must be a multiple of the vector's size, and a fence must follow before another
// thread reads it.
template <typename T>
FASTMOD_INLINE void stream(T* p, Vec<T> v) {
#if FASTMOD_VECTOR_BYTES == 64
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), (__m512i)v);
#elif FASTMOD_VECTOR_BYTES == 32
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), (__m256i)v);
#else
  store(p, v);
#endif
}
FASTMOD_INLINE void stream_fence() {
#if FASTMOD_VECTOR_BYTES > 16
  _mm_sfence();
#endif
}
template <typename T>
FASTMOD_INLINE Vec<T> splat(T value) {
  return value - Vec<T>{};
}
// The first `count` entries (0 .. lanes), the rest zero; memory past them is not touched.
#if FASTMOD_VECTOR_BYTES == 64
FASTMOD_INLINE Vec<float> load_first(const float* p, int64_t count) {
  return (Vec<float>)_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), p);
}
FASTMOD_INLINE Vec<double> load_first(const double* p, int64_t count) {
  return (Vec<double>)_mm512_maskz_loadu_pd(__mmask8((1u << count) - 1), p);
}
FASTMOD_INLINE void store_first(float* p, Vec<float> v, int64_t count) {
  _mm512_mask_storeu_ps(p, __mmask16((1u << count) - 1), (__m512)v);
}
FASTMOD_INLINE void store_first(double* p, Vec<double> v, int64_t count) {
  _mm512_mask_storeu_pd(p, __mmask8((1u << count) - 1), (__m512d)v);
}
#else
template <typename T>
FASTMOD_INLINE Vec<T> load_first(const T* p, int64_t count) {
  Vec<T> v{};
  for (int i = 0; i < kLanes<T>; ++i)
    if (i < count) v[i] = p[i];
  return v;
}
template <typename T>
FASTMOD_INLINE void store_first(T* p, Vec<T> v, int64_t count) {
  for (int i = 0; i < kLanes<T>; ++i)
    if (i < count) p[i] = v[i];
}
#endif

// Calls step(i, lanes) for every whole vector of `count` entries, then for the rest.
template <typename T, typename Count, typename Step>
FASTMOD_INLINE void by_vectors(Count count, const Step& step) {
  int64_t i = 0;
  for (; i + kLanes<T> <= count; i += kLanes<T>) step(i, std::integral_constant<int64_t, kLanes<T>>{});
  if (i < count) step(i, count - i);
}
template <typename T, typename Lanes>
FASTMOD_INLINE Vec<T> load_lanes(const T* p, Lanes lanes) {
  if constexpr (std::is_same_v<Lanes, int64_t>) return load_first(p, lanes);
  else return load(p);
}
template <typename T, typename Lanes>
FASTMOD_INLINE void store_lanes(T* p, Vec<T> v, Lanes lanes) {
  if constexpr (std::is_same_v<Lanes, int64_t>) store_first(p, v, lanes);
  else store(p, v);
}

// The larger of a and b; a NaN in a stays. One instruction does this, but from a comparison the compiler makes two.
template <typename T>
FASTMOD_INLINE Vec<T> maximum(Vec<T> a, Vec<T> b) {
#if FASTMOD_VECTOR_BYTES == 64
  if constexpr (sizeof(T) == 4) return (Vec<T>)_mm512_max_ps((__m512)b, (__m512)a);
  else return (Vec<T>)_mm512_max_pd((__m512d)b, (__m512d)a);
#elif FASTMOD_VECTOR_BYTES == 32
  if constexpr (sizeof(T) == 4) return (Vec<T>)_mm256_max_ps((__m256)b, (__m256)a);
  else return (Vec<T>)_mm256_max_pd((__m256d)b, (__m256d)a);
#else
  return b > a ? b : a;
#endif
}

// The same value, hidden from the compiler, which then cannot merge it with what follows.
template <typename V>
FASTMOD_INLINE V opaque(V value) {
#if FASTMOD_VECTOR_BYTES == 64
  asm("" : "+v"(value));
#elif defined(__x86_64__)
  asm("" : "+x"(value));
#elif defined(__aarch64__)
  asm("" : "+w"(value));
#else
  asm("" : "+m"(value));
#endif
  return value;
}

// Sum of all lanes, by halves.
template <int kDistance, typename V, size_t... i>
FASTMOD_INLINE V exchanged(V v, std::index_sequence<i...>) {
  return __builtin_shufflevector(v, v, int(i ^ kDistance)...);
}
template <typename T, int kDistance = kLanes<T> / 2>
FASTMOD_INLINE T sum_lanes(Vec<T> v) {
  v += exchanged<kDistance>(v, std::make_index_sequence<kLanes<T>>{});
  if constexpr (kDistance > 1) return sum_lanes<T, kDistance / 2>(v);
  else return v[0];
}

// 1 / v of ordinary numbers, with one more rounding than a division. Where the CPU has an estimate that two products
// refine, a division costs as much as a dozen products.
FASTMOD_INLINE Vec<float> reciprocal(Vec<float> v) {
#if FASTMOD_VECTOR_BYTES == 64
  const Vec<float> near = (Vec<float>)_mm512_rcp14_ps((__m512)v);
  return near + near * (1.0f - v * near);
#else
  return 1.0f / v;
#endif
}
FASTMOD_INLINE Vec<double> reciprocal(Vec<double> v) { return 1.0 / v; }

// exp: argument reduction and polynomial of Cephes' expf, about 1 ulp; overflow to inf, gradual underflow, NaN kept.
// kNegative: the argument is not above 0, as in a softmax.
template <bool kNegative = false>
FASTMOD_INLINE Vec<float> vexp(Vec<float> x) {
  const Vec<float> low = splat(-105.0f), high = splat(89.0f);
  x = maximum<float>(x, low);
  if (!kNegative) x = x > high ? high : x;
  const Vec<float> shifter = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec<float> n = (x * 1.44269504088896341f + shifter) - shifter;
  Vec<float> r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Vec<float> p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
#if FASTMOD_VECTOR_BYTES == 64
  return (Vec<float>)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  const IntVec whole = __builtin_convertvector(n, IntVec), half = whole >> 1;
  // Two factors, so that neither leaves the range of normal numbers.
  return p * (Vec<float>)((half + 127) << 23) * (Vec<float>)((whole - half + 127) << 23);
#endif
}

// log of positive normal numbers: Cephes' logf.
FASTMOD_INLINE Vec<float> vlog(Vec<float> x) {
  const IntVec bits = (IntVec)x;
  IntVec exponent = ((bits >> 23) & 0xff) - 126;
  Vec<float> m = (Vec<float>)((bits & 0x007fffff) | 0x3f000000);  // [0.5, 1)
  const IntVec small = m < splat(0.707106781186547524f);
  exponent = exponent + small;  // true is -1
  m = (small ? m + m : m) - 1.0f;
  const Vec<float> e = __builtin_convertvector(exponent, Vec<float>);
  const Vec<float> z = m * m;
  Vec<float> y = splat(7.0376836292e-2f);
  y = y * m - 1.1514610310e-1f;
  y = y * m + 1.1676998740e-1f;
  y = y * m - 1.2420140846e-1f;
  y = y * m + 1.4249322787e-1f;
  y = y * m - 1.6668057665e-1f;
  y = y * m + 2.0000714765e-1f;
  y = y * m - 2.4999993993e-1f;
  y = y * m + 3.3333331174e-1f;
  y = y * m * z;
  y = y + e * -2.12194440e-4f;
  y = y - 0.5f * z;
  return m + y + e * 0.693359375f;
}

// fp64 is for gradient checks and exactness, not for speed: libm, lane by lane.
template <bool kNegative = false>
FASTMOD_INLINE Vec<double> vexp(Vec<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = std::exp(x[i]);
  return x;
}
FASTMOD_INLINE Vec<double> vlog(Vec<double> x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = std::log(x[i]);
  return x;
}

template <typename T>
FASTMOD_INLINE Vec<T> sigmoid(Vec<T> x) {
  return T(1) / (T(1) + vexp(-x));
}

// ---- transposes between [batch, feature] in memory and batch-last tiles

// log2(lanes) perfect shuffles of rows i and i + lanes/2 transpose a square block.
template <typename V, int lanes, size_t... i>
FASTMOD_INLINE V interleave_low(V a, V b, std::index_sequence<i...>) {
  return __builtin_shufflevector(a, b, (i % 2 ? int(lanes + i / 2) : int(i / 2))...);
}
template <typename V, int lanes, size_t... i>
FASTMOD_INLINE V interleave_high(V a, V b, std::index_sequence<i...>) {
  return __builtin_shufflevector(a, b, (i % 2 ? int(lanes + lanes / 2 + i / 2) : int(lanes / 2 + i / 2))...);
}

// A block of at most lanes x lanes; kPartial: only `rows` x `columns`, and nothing outside them is touched.
template <typename T, bool kPartial>
FASTMOD_INLINE void transpose_block(const T* source, int64_t source_stride, T* target, int64_t target_stride,
                                    int64_t rows, int64_t columns) {
  constexpr int lanes = kLanes<T>;
  constexpr auto sequence = std::make_index_sequence<lanes>{};
  Vec<T> a[lanes], b[lanes];
#pragma GCC unroll 16
  for (int i = 0; i < lanes; ++i) {
    if constexpr (kPartial) a[i] = i < rows ? load_first(source + i * source_stride, columns) : Vec<T>{};
    else a[i] = load(source + i * source_stride);
  }
#pragma GCC unroll 4
  for (int step = lanes; step > 1; step /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < lanes / 2; ++i) {
      b[2 * i] = interleave_low<Vec<T>, lanes>(a[i], a[i + lanes / 2], sequence);
      b[2 * i + 1] = interleave_high<Vec<T>, lanes>(a[i], a[i + lanes / 2], sequence);
    }
#pragma GCC unroll 16
    for (int i = 0; i < lanes; ++i) a[i] = b[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < lanes; ++i) {
    if constexpr (!kPartial) store(target + i * target_stride, a[i]);
    else if (i < columns) store_first(target + i * target_stride, a[i], rows);
  }
}

// target[c][r] = source[r][c] for r < rows, c < columns
template <typename T>
void transpose(const T* source, int64_t source_stride, int64_t rows, int64_t columns, T* target,
               int64_t target_stride) {
  constexpr int lanes = kLanes<T>;
  for (int64_t r = 0; r < rows; r += lanes)
    for (int64_t c = 0; c < columns; c += lanes) {
      const T* from = source + r * source_stride + c;
      T* to = target + c * target_stride + r;
      const int64_t height = std::min<int64_t>(lanes, rows - r), width = std::min<int64_t>(lanes, columns - c);
      if (height == lanes && width == lanes)
        transpose_block<T, false>(from, source_stride, to, target_stride, lanes, lanes);
      else transpose_block<T, true>(from, source_stride, to, target_stride, height, width);
    }
}

// Loads rows [count, features] of a batch into a tile [features, kWidth]; columns past `count` are zero.
template <int kWidth, typename T>
void into_tile(const T* source, int64_t count, int64_t features, T* tile) {
  if (count < kWidth)
    for (int64_t f = 0; f < features; ++f) std::fill(tile + f * kWidth + count, tile + (f + 1) * kWidth, T(0));
  transpose(source, features, count, features, tile, kWidth);
}

template <int kWidth, typename T>
void from_tile(const T* tile, int64_t count, int64_t features, T* target) {
  transpose(tile, kWidth, features, count, target, features);
}

// Data that is needed next spans pages, where the hardware prefetcher stops, so kernels prefetch it while they compute:
// one tensor at a time, between the steps, as all at once would stall with nothing to compute meanwhile.
template <int kWrite, typename T>
FASTMOD_INLINE void prefetch(const T* data, int64_t count) {
#pragma GCC unroll 8
  for (int64_t i = 0; i < count; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(data + i, kWrite);
}

FASTMOD_KERNELS(VectorKernels, .lanes = kLanes<T>, .transpose = transpose<T>);

}  // namespace fastmod::cpu::FASTMOD_ISA

#endif
