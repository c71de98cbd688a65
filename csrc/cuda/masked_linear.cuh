// What the kernels of masked_linear share: noise of four neighbouring weights, and how rows are dealt to warps.
#pragma once

#include "masks.cuh"
#include "mma.cuh"

namespace fastmod::cuda {

// Noise words of the weights `index` .. `index` + 3. One Philox call serves four if every row begins at a multiple of 4
// (`quads`), else two calls.
__device__ inline PhiloxWords quad_words(const PhiloxKeys& keys, uint64_t index, uint32_t stream, bool quads) {
  PhiloxWords words = philox_group(keys, index / kQuad, stream);
  if (quads) return words;
  const PhiloxWords next = philox_group(keys, index / kQuad + 1, stream);
  uint32_t moved[6];
#pragma unroll
  for (int i = 0; i < 6; ++i) {  // by comparisons: an indexed local array would live in memory
    const uint32_t far = i + 2 < kQuad ? words.word[i + 2] : next.word[i + 2 - kQuad];
    const uint32_t near = i < kQuad ? words.word[i] : next.word[i - kQuad];
    moved[i] = index & 2 ? far : near;
  }
#pragma unroll
  for (int i = 0; i < kQuad; ++i) words.word[i] = index & 1 ? moved[i + 1] : moved[i];
  return words;
}

// Where the noise of a sample begins.
__device__ inline uint64_t first_word(const LinearShape& shape, const MaskNoise& noise, int64_t sample) {
  return static_cast<uint64_t>((noise.first + sample) * shape.out * shape.in);
}

// Four numbers of a row or a column, those that a lane has of a chunk of 16: its k = 4 t .. 4 t + 3. One unit of two words
// each, fp32 two units of four words: high and low tf32 numbers.
template <typename T>
struct Four {
  using Unit = uint2;
  static constexpr int kParts = 1;
  // Whether all are finite.
  static __device__ bool split(const float (&v)[4], bool, Unit (&unit)[1]) {
    T* type = nullptr;
    unit[0] = {half_word(v[0], v[1], type), half_word(v[2], v[3], type)};
    const float all = (v[0] + v[1]) + (v[2] + v[3]);
    return all - all == 0.0f;
  }
  // d = a b of a whole chunk, a: of rows g and g + 8, b: of column g.
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

// Rows in tiles of 16. A slab is what a warp multiplies: up to kTiles tiles, of several samples or of a part of one.
constexpr int kTileHeight = 16;
constexpr int kTiles = 4;
constexpr int kSlabRows = kTiles * kTileHeight;

struct Slabs {
  int64_t rows, all_samples;  // rows of a sample
  int samples, tiles;         // of a slab: samples, and tiles of each of them
  int64_t along, count;       // slabs of one sample, if it has more than one; of all

  Slabs(int64_t rows_, int64_t samples_) : rows(rows_), all_samples(samples_) {
    const int64_t needed = (rows + kTileHeight - 1) / kTileHeight;
    tiles = static_cast<int>(needed < 1 ? 1 : needed < kTiles ? needed : kTiles);
    samples = kTiles / tiles;
    along = needed <= kTiles ? 1 : (needed + kTiles - 1) / kTiles;
    count = along == 1 ? (all_samples + samples - 1) / samples : all_samples * along;
  }
  __host__ __device__ int64_t first_sample(int64_t slab) const { return quotient(slab, along) * samples; }
  // Where row `local` of a slab is among all rows, or -1.
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
