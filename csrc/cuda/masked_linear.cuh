// Shared by the kernels of masked_linear: noise of four neighbouring weights, and how rows are distributed over warps.
#pragma once

#include "masks.cuh"
#include "mixed.cuh"
#include "mma.cuh"

namespace fastmod::cuda {

// The first noise word of a sample.
__device__ inline uint64_t first_word(const LinearShape& shape, const MaskNoise& noise, int64_t sample) {
  return static_cast<uint64_t>((noise.first + sample) * shape.out * shape.in);
}

// The four numbers of a row or a column that a lane has of a chunk of 16: k = 4 t .. 4 t + 3. They are one unit of two
// words, or for fp32 two units of four words: high and low tf32 numbers.
template <typename T>
struct Four {
  using Unit = uint2;
  static constexpr int kParts = 1;
  // Returns whether all are finite.
  static __device__ bool split(const float (&v)[4], bool, Unit (&unit)[1]) {
    T* type = nullptr;
    unit[0] = {half_word(v[0], v[1], type), half_word(v[2], v[3], type)};
    const float all = (v[0] + v[1]) + (v[2] + v[3]);
    return all - all == 0.0f;
  }
  // For weights with the shares of their masks: also returns false if a share is NaN.
  static __device__ bool split(const float (&v)[4], const float (&share)[4], bool, Unit (&unit)[1]) {
    T* type = nullptr;
    unit[0] = {half_word(v[0], v[1], type), half_word(v[2], v[3], type)};
    const float all = v[0] * share[0] + v[1] * share[1] + v[2] * share[2] + v[3] * share[3];
    return all - all == 0.0f;
  }
  // d = a b over a whole chunk; a: rows g and g + 8, b: column g.
  template <bool kPrecise>
  static __device__ void multiply(const Unit (&a)[2][1], const Unit (&b)[1], float (&d)[4]) {
    mma_from_zero(static_cast<T*>(nullptr), d, {a[0][0].x, a[1][0].x, a[0][0].y, a[1][0].y}, b[0].x, b[0].y);
  }
};
template <>
struct Four<float> {
  using Unit = uint4;
  static constexpr int kParts = 2;
  static __device__ bool split(const float (&v)[4], bool precise, Unit (&unit)[2]) {
    uint32_t high[4], low[4];
    const bool finite = split_tf32(v, precise, high, low);
    unit[0] = {high[0], high[1], high[2], high[3]};
    unit[1] = {low[0], low[1], low[2], low[3]};
    return finite;
  }
  static __device__ bool split(const float (&v)[4], const float (&share)[4], bool, Unit (&unit)[2]) {
    const float all = split_finite(v, unit, share);
    return all - all == 0.0f;
  }
  // Splits as if all were finite; returns a number that is not finite if a number or a share is not.
  static __device__ float split_finite(const float (&v)[4], Unit (&unit)[2], const float (&share)[4] = {1, 1, 1, 1}) {
    uint32_t high[4], low[4];
    float all = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      high[i] = tf32_bits(v[i]);
      const float rest = rest_of(v[i], high[i]);
      low[i] = tf32_bits(rest);
      all = i == 0 ? rest * share[i] : all + rest * share[i];
    }
    unit[0] = {high[0], high[1], high[2], high[3]};
    unit[1] = {low[0], low[1], low[2], low[3]};
    return all;
  }
  template <bool kPrecise>
  static __device__ void multiply(const Unit (&a)[2][2], const Unit (&b)[2], float (&d)[4]) {
    float* type = nullptr;
    const uint32_t first[] = {a[0][0].x, a[1][0].x, a[0][0].y, a[1][0].y};
    const uint32_t second[] = {a[0][0].z, a[1][0].z, a[0][0].w, a[1][0].w};
    if constexpr (kPrecise) {
      const uint32_t first_low[] = {a[0][1].x, a[1][1].x, a[0][1].y, a[1][1].y};
      const uint32_t second_low[] = {a[0][1].z, a[1][1].z, a[0][1].w, a[1][1].w};
      mma_from_zero(type, d, first_low, b[0].x, b[0].y);
      mma(type, d, second_low, b[0].z, b[0].w);
      mma(type, d, first, b[1].x, b[1].y);
      mma(type, d, second, b[1].z, b[1].w);
      mma(type, d, first, b[0].x, b[0].y);
    } else {
      mma_from_zero(type, d, first, b[0].x, b[0].y);
    }
    mma(type, d, second, b[0].z, b[0].w);
  }
};

// Four neighbours at once.
template <typename T>
__device__ void read_quad(const T* from, float (&v)[kQuad]) {
  if constexpr (sizeof(T) == 4) {
    const float4 four = *reinterpret_cast<const float4*>(from);
    v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
  } else {
    struct alignas(8) {
      T value[kQuad];
    } four;
    *reinterpret_cast<uint2*>(&four) = *reinterpret_cast<const uint2*>(from);
#pragma unroll
    for (int i = 0; i < kQuad; ++i) v[i] = widen(four.value[i]);
  }
}
template <typename T>
__device__ void write_quad(const float (&v)[kQuad], T* to) {
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<float4*>(to) = {v[0], v[1], v[2], v[3]};
  } else {
    T* type = nullptr;
    *reinterpret_cast<uint2*>(to) = {half_word(v[0], v[1], type), half_word(v[2], v[3], type)};
  }
}
template <typename T>
__device__ void read_quad(const Mixed<const T>& from, float (&v)[kQuad]) {
  if (!from.wide) return read_quad(from.narrow, v);
  read_quad(from.wide, v);
#pragma unroll
  for (int i = 0; i < kQuad; ++i) v[i] = rounded_to<T>(v[i]);
}
template <typename T>
__device__ void write_quad(const float (&v)[kQuad], const Mixed<T>& to) {
  if (to.wide) {
    write_quad(v, to.wide);
  } else {
    write_quad(v, to.narrow);
  }
}

// Copies four neighbours to shared memory, zeros beyond `valid`. kVector: all four at once, or none.
template <bool kVector, typename T>
__device__ void copy_quad(T* to, const T* from, int valid) {
  if constexpr (kVector) {
    copy_async<kQuad * sizeof(T)>(to, from, valid > 0);
  } else {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      if constexpr (sizeof(T) == 4) {
        copy_async<4>(to + i, i < valid ? from + i : from, i < valid);
      } else {
        narrow(i < valid ? widen(from[i]) : 0.0f, to + i);
      }
    }
  }
}

// For fp32 that is treated as rounded to T: goes through registers.
template <bool kVector, typename T>
__device__ void copy_quad(T* to, const Mixed<const T>& from, int valid) {
  if (!from.wide) return copy_quad<kVector>(to, from.narrow, valid);
  float v[kQuad] = {};
  if constexpr (kVector) {
    if (valid > 0) read_quad(from.wide, v);
  } else {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) v[i] = i < valid ? from.wide[i] : 0.0f;
  }
  write_quad(v, to);
}

__device__ inline int clamped(int64_t left) { return left <= 0 ? 0 : left < kQuad ? static_cast<int>(left) : kQuad; }

template <typename T>
inline bool quads_aligned(const T* pointer, int64_t row) {
  return reinterpret_cast<uintptr_t>(pointer) % (kQuad * sizeof(T)) == 0 && row % kQuad == 0;
}
template <typename T>
inline bool quads_aligned(const Mixed<T>& tensor, int64_t row) {
  return tensor.wide ? quads_aligned(tensor.wide, row) : quads_aligned(tensor.narrow, row);
}

// Blocks of one copy, times copies; a launch with more than 65535 copies fails.
inline dim3 grid_of(int64_t blocks, const LinearCopies& copies) {
  return dim3(blocks_for(blocks, 1).x, blocks_for(copies.count, 1).x);
}

// Reads what other blocks wrote while this one ran.
__device__ inline float4 fresh_quad(const float* address) {
#if defined(__CUDA_ARCH__)
  float4 four;
  asm volatile("ld.volatile.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
               : "l"(__cvta_generic_to_global(address)));
  return four;
#else
  const volatile float* from = address;
  return {from[0], from[1], from[2], from[3]};
#endif
}

// Rows are split into tiles of 16. A warp multiplies a slab: up to kTiles tiles, of several samples or of a part of
// one.
constexpr int kTileHeight = 16;
constexpr int kTiles = 4;
constexpr int kSlabRows = kTiles * kTileHeight;

struct Slabs {
  int64_t rows, all_samples;  // rows of a sample
  int samples, tiles;         // of a slab: samples, and tiles per sample
  int64_t along, count;       // slabs of one sample, if it has more than one; slabs in total

  Slabs(int64_t rows_, int64_t samples_) : rows(rows_), all_samples(samples_) {
    const int64_t needed = (rows + kTileHeight - 1) / kTileHeight;
    tiles = static_cast<int>(needed < 1 ? 1 : needed < kTiles ? needed : kTiles);
    samples = kTiles / tiles;
    along = needed <= kTiles ? 1 : (needed + kTiles - 1) / kTiles;
    count = along == 1 ? (all_samples + samples - 1) / samples : all_samples * along;
  }
  __device__ int64_t first_sample(int64_t slab) const { return quotient(slab, along) * samples; }
  // The index of row `local` of a slab among all rows, or -1.
  __device__ int64_t row(int64_t slab, int local) const {
    const int tile = local / kTileHeight, own = tile / tiles;
    const int64_t part = slab - quotient(slab, along) * along, sample = first_sample(slab) + own;
    const int64_t row = (part * tiles + tile - own * tiles) * kTileHeight + local % kTileHeight;
    return own < samples && sample < all_samples && row < rows ? sample * rows + row : -1;
  }
};

// ---- masked_linear_plain.cu: fp64

namespace plain {

cudaError_t forward(const double* x, const double* weight, const double* logits, const double* biases, double* result,
                    LinearShape shape, MaskNoise noise, cudaStream_t stream);
cudaError_t backward_x(const double* grad, const double* weight, const double* logits, double* grad_x,
                       LinearShape shape, MaskNoise noise, cudaStream_t stream);
cudaError_t backward_weight(const double* grad, const double* x, const double* weight, const double* logits,
                            double* grad_weight, double* grad_logits, double tau, LinearShape shape, MaskNoise noise,
                            cudaStream_t stream);

}  // namespace plain

}  // namespace fastmod::cuda
