// Tensor cores and asynchronous copies, one function per PTX instruction; the host harness has its own (mma_host.h).
//
// Fragments of a product d += a b for lane 4 g + t of a warp (g = lane / 4, t = lane % 4); a word holds two 16-bit
// numbers:
//     d[0], d[1]: row g, columns 2 t and 2 t + 1; d[2], d[3]: row g + 8
//     tf32, k = 8:     a[0]: row g, k = t; a[1]: row g + 8; a[2], a[3]: the same for k = t + 4; b: of column g
//     16 bits, k = 16: a[0]: row g, k = 2 t, 2 t + 1; a[1]: row g + 8; a[2], a[3]: k = 2 t + 8, + 9; b: of column g
// The order of k is free as long as a and b agree: kernels assign channels so that those of a lane are neighbours.
#pragma once

#include <type_traits>

#include "common.cuh"

#if defined(FASTMOD_CUDA_HOST)
#include "mma_host.h"
#endif

namespace fastmod::cuda {

#if defined(FASTMOD_CUDA_HOST)

inline uint32_t tf32_bits(float value) {
  const uint32_t bits = __float_as_uint(value);
  return (bits & 0x7f800000u) == 0x7f800000u ? bits : (bits + 0x1000u) & 0xffffe000u;
}

inline void mma_on_host(cuda_host::Operand kind, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                        int line) {
  cuda_host::MmaLane lane{kind, {d[0], d[1], d[2], d[3]}, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  cuda_host::collective(&lane, cuda_host::run_mma, line);
  for (int i = 0; i < 4; ++i) d[i] = lane.d[i];
}
inline void mma(float*, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int line = __builtin_LINE()) {
  mma_on_host(cuda_host::Operand::kTf32, d, a, b0, b1, line);
}
inline void mma(__half*, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int line = __builtin_LINE()) {
  mma_on_host(cuda_host::Operand::kHalf, d, a, b0, b1, line);
}
inline void mma(__nv_bfloat16*, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                int line = __builtin_LINE()) {
  mma_on_host(cuda_host::Operand::kBfloat16, d, a, b0, b1, line);
}

template <typename T>
inline void mma_from_zero(T* type, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                          int line = __builtin_LINE()) {
  for (float& value : d) value = 0.0f;
  mma(type, d, a, b0, b1, line);
}

inline void ldmatrix_transposed(uint32_t (&result)[4], const void* row, int line = __builtin_LINE()) {
  cuda_host::MatrixLane lane{};
  const uint4 read = *static_cast<const uint4*>(row);
  lane.row[0] = read.x, lane.row[1] = read.y, lane.row[2] = read.z, lane.row[3] = read.w;
  cuda_host::collective(&lane, cuda_host::run_ldmatrix_transposed, line);
  for (int i = 0; i < 4; ++i) result[i] = lane.result[i];
}

template <int kBytes>
inline void copy_async(void* shared, const void* global, bool inside, int line = __builtin_LINE()) {
  cuda_host::start_async(shared, global, kBytes, inside ? kBytes : 0, line);
}
using SharedAddress = unsigned char*;
inline SharedAddress shared_address(void* shared) { return static_cast<SharedAddress>(shared); }
template <int kBytes>
inline void copy_async_to(SharedAddress shared, const void* global, int size, int line = __builtin_LINE()) {
  cuda_host::start_async(shared, global, kBytes, size, line);
}
inline void commit_copies() { cuda_host::commit_async(); }
template <int kGroups>
inline void wait_copies() {
  cuda_host::wait_async(kGroups);
}

#else

// Rounded to nearest, ties away from zero.
__device__ inline uint32_t tf32_bits(float value) {
#if __CUDA_ARCH__ >= 800
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
#else
  const uint32_t bits = __float_as_uint(value);
  return (bits & 0x7f800000u) == 0x7f800000u ? bits : (bits + 0x1000u) & 0xffffe000u;
#endif
}

#if __CUDA_ARCH__ < 800
// Before sm_80 there is neither tf32 nor bf16: the same product by shuffles, slow but correct. kHalves: numbers per
// word.
template <int kHalves, typename Widen>
__device__ inline void mma_by_shuffles(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Widen widened) {
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int high = 0; high < 2; ++high) {
#pragma unroll 1  // a kernel has hundreds of these products: unrolled, it takes ptxas minutes
    for (int j = 0; j < 4; ++j) {
      const uint32_t top = __shfl_sync(kAllLanes, a[2 * high], 4 * g + j);
      const uint32_t bottom = __shfl_sync(kAllLanes, a[2 * high + 1], 4 * g + j);
      const uint32_t left = __shfl_sync(kAllLanes, high ? b1 : b0, 4 * (2 * t) + j);
      const uint32_t right = __shfl_sync(kAllLanes, high ? b1 : b0, 4 * (2 * t + 1) + j);
#pragma unroll
      for (int i = 0; i < kHalves; ++i) {
        d[0] += widened(top, i) * widened(left, i);
        d[1] += widened(top, i) * widened(right, i);
        d[2] += widened(bottom, i) * widened(left, i);
        d[3] += widened(bottom, i) * widened(right, i);
      }
    }
  }
}
#endif

// The type of the first argument says what the words hold.
__device__ inline void mma(float*, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  mma_by_shuffles<1>(d, a, b0, b1, [](uint32_t word, int) { return __uint_as_float(word); });
#endif
}
__device__ inline void mma(__half*, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  mma_by_shuffles<2>(d, a, b0, b1, [](uint32_t word, int i) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(word >> 16 * i)));
  });
#endif
}
__device__ inline void mma(__nv_bfloat16*, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  mma_by_shuffles<2>(d, a, b0, b1, [](uint32_t word, int i) {
    return __uint_as_float(i ? word & 0xffff0000u : word << 16);
  });
#endif
}

// d = a b; d need not be cleared first.
template <typename T>
__device__ inline void mma_from_zero(T* type, float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  if constexpr (sizeof(T) == 4) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
  } else if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%10,%10,%10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
  }
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) d[i] = 0.0f;
  mma(type, d, a, b0, b1);
#endif
}

// Four 8x8 matrices of 16-bit numbers: lane i passes the address of row i % 8 of matrix i / 8 and gets (row 2 t,
// column g) and (row 2 t + 1, column g) of each.
__device__ inline void ldmatrix_transposed(uint32_t (&result)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(result[0]), "=r"(result[1]), "=r"(result[2]), "=r"(result[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}

// The 32-bit addresses that instructions take; cheaper to compute with than pointers.
using SharedAddress = uint32_t;
__device__ inline SharedAddress shared_address(void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}
// Copies kBytes (4, 8 or 16) from global to shared memory, or zeros if `size` is 0 instead of kBytes; `global` must be
// a valid address either way. Visible after this thread has waited, to others after an additional barrier.
template <int kBytes>
__device__ inline void copy_async_to(SharedAddress shared, const void* global, int size) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(size) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(kBytes), "r"(size)
                 : "memory");
  }
#else
  auto* words = static_cast<uint32_t*>(__cvta_shared_to_generic(shared));
#pragma unroll
  for (int i = 0; i < kBytes / 4; ++i) words[i] = size ? static_cast<const uint32_t*>(global)[i] : 0u;
#endif
}
template <int kBytes>
__device__ inline void copy_async(void* shared, const void* global, bool inside) {
  copy_async_to<kBytes>(shared_address(shared), global, inside ? kBytes : 0);
}
__device__ inline void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until at most kGroups groups of this thread's copies are in flight.
template <int kGroups>
__device__ inline void wait_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
#endif
}

#endif

__device__ inline uint32_t half_word(float low, float high, __half*) {
#if defined(FASTMOD_CUDA_HOST)
  return cuda_host::half_bits(low) | static_cast<uint32_t>(cuda_host::half_bits(high)) << 16;
#else
  return __half_as_ushort(__float2half_rn(low)) | static_cast<uint32_t>(__half_as_ushort(__float2half_rn(high))) << 16;
#endif
}
__device__ inline uint32_t half_word(float low, float high, __nv_bfloat16*) {
#if defined(FASTMOD_CUDA_HOST)
  return cuda_host::bfloat16_bits(low) | static_cast<uint32_t>(cuda_host::bfloat16_bits(high)) << 16;
#else
  return __bfloat16_as_ushort(__float2bfloat16_rn(low)) |
         static_cast<uint32_t>(__bfloat16_as_ushort(__float2bfloat16_rn(high))) << 16;
#endif
}

// value - high. Asm mixes words and floats in registers without conversions; this returns a word, rest_of a float.
__device__ inline uint32_t tf32_rest(float value, uint32_t high) {
#if defined(__CUDA_ARCH__)
  uint32_t rest;
  asm("sub.f32 %0, %1, %2;" : "=r"(rest) : "f"(value), "r"(high));
  return rest;
#else
  return __float_as_uint(value - __uint_as_float(high));
#endif
}
// high + grown value, rounded once.
__device__ inline uint32_t tf32_less(float value, float grown, uint32_t high) {
#if defined(__CUDA_ARCH__)
  uint32_t rest;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=r"(rest) : "f"(value), "f"(grown), "r"(high));
  return rest;
#else
  return __float_as_uint(fmaf(value, grown, __uint_as_float(high)));
#endif
}
// high - value.
__device__ inline float less_of(float value, uint32_t high) {
#if defined(__CUDA_ARCH__)
  float rest;
  asm("sub.f32 %0, %1, %2;" : "=f"(rest) : "r"(high), "f"(value));
  return rest;
#else
  return __uint_as_float(high) - value;
#endif
}
__device__ inline float rest_of(float value, uint32_t high) {
#if defined(__CUDA_ARCH__)
  float rest;
  asm("sub.f32 %0, %1, %2;" : "=f"(rest) : "f"(value), "r"(high));
  return rest;
#else
  return value - __uint_as_float(high);
#endif
}

// Tensor cores truncate sums where an adder would round them. Each product loses half a unit in the last place, which
// on average is this fraction of the sum and can be compensated for. The remaining error is as small as from rounding.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr float kCutOff = 0.0f;  // sums of mma_by_shuffles are rounded
#else
constexpr float kCutOff = 0.72f / 16777216.0f;
#endif
constexpr int kExactDepth = 4;  // sums of so few products lose next to nothing

// value = high + low, two tf32 numbers, up to an error of 2^-22: three products of them (all but low times low) make
// one of fp32. A value that is not finite becomes a low part alone. Then it is multiplied only by the other factor's
// high part; a high part would be multiplied by the low part too, which may be zero or have the other sign. Unless
// `precise`, low is not read. `grown`: the fraction of value that is added to low.
__device__ inline void split_tf32(float value, bool precise, uint32_t* high, uint32_t* low, float grown = 0.0f) {
  *high = tf32_bits(value);
  const float rest = grown * value + (value - __uint_as_float(*high));
  *low = tf32_bits(rest);
  if (rest - rest != 0.0f && precise) {
    *high = 0;
    *low = __float_as_uint(value);
  }
}

// Four at once; returns whether all are finite, which is nearly always so.
__device__ inline bool split_tf32(const float (&value)[4], bool precise, uint32_t (&high)[4], uint32_t (&low)[4]) {
  float rest[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    high[i] = tf32_bits(value[i]);
    rest[i] = rest_of(value[i], high[i]);
    low[i] = tf32_bits(rest[i]);
  }
  const float all = (rest[0] + rest[1]) + (rest[2] + rest[3]);
  if (all - all == 0.0f) return true;
#pragma unroll
  for (int i = 0; i < 4; ++i) split_tf32(value[i], precise, &high[i], &low[i]);
  return false;
}

}  // namespace fastmod::cuda
