// Products of activations and weights of a stack on tensor cores. See smfr.cuh.
#pragma once

#include "smfr_stream.cuh"

namespace fastmod::cuda {

__device__ inline uint32_t last_bit(uint32_t rest) { return tf32_rest(__uint_as_float(rest), rest & 0xffffe000u); }

// A zero that nvcc sets where it is written, instead of ahead of all branches.
__device__ inline float zero() {
  float value = 0.0f;
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+f"(value));
#endif
  return value;
}

// Products by shuffles are long code, so there is only one form of them.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr bool kOneForm = true;
#else
constexpr bool kOneForm = false;
#endif

struct alignas(16) Four32 {
  float v[4];
};

// Sums of activations [row][k] times weights, for kTiles x 8 columns: result[tile][like d in mma.cuh], from kProducts
// products of high and low parts. `low` and all low parts have the opposite sign. Thereby one fma, high - (1 + share)
// weight, makes the low part of a weight and compensates for the truncation of its products. For other weights the
// compensation is added between a unit's chunks.
template <int kProducts, int kTiles, typename T, typename W, bool kBackward>
__device__ inline void multiply(WeightStream<T, W, kBackward>& stream, const float* activations,
                                const LinearPlan<T, W>& plan, float (&result)[2][4]) {
  constexpr bool kSplit = sizeof(T) == 4, kGrown = kProducts == 3;
  const auto* from = reinterpret_cast<const Four32*>(activations) + stream.lane;
  const float cut_off = !kGrown && plan.terms <= kExactDepth ? 0.0f : 2.0f * kCutOff;  // per chunk
  float low[2][4], less = -plan.share;
  const auto add_chunk = [&](auto is_first, const float(&w)[2][4], float grown) {
    constexpr bool kFirst = decltype(is_first)::value;
    const Four32 high[2] = {from[0], from[kLow / 8]}, rest[2] = {from[kLow / 4], from[kLow / 4 + kLow / 8]};
    from += kChunkFloats / 4;
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      const int tile = i / 2, k = i % 2;
      const float b[2] = {kBackward ? w[k][tile] : w[tile][2 * k], kBackward ? w[k][2 + tile] : w[tile][2 * k + 1]};
      const uint32_t a[4] = {__float_as_uint(high[0].v[2 * k]), __float_as_uint(high[1].v[2 * k]),
                             __float_as_uint(high[0].v[2 * k + 1]), __float_as_uint(high[1].v[2 * k + 1])};
      const uint32_t b0 = kSplit ? tf32_bits(b[0]) : __float_as_uint(b[0]);
      const uint32_t b1 = kSplit ? tf32_bits(b[1]) : __float_as_uint(b[1]);
      float* type = nullptr;
      kFirst && k == 0 ? mma_from_zero(type, result[tile], a, b0, b1) : mma(type, result[tile], a, b0, b1);
      if constexpr (kProducts == 1) {
#pragma unroll
        for (int j = 0; j < 4 && kFirst && k == 0; ++j) low[tile][j] = 0.0f;
      } else {
        const uint32_t a_rest[4] = {__float_as_uint(rest[0].v[2 * k]), __float_as_uint(rest[1].v[2 * k]),
                                    __float_as_uint(rest[0].v[2 * k + 1]), __float_as_uint(rest[1].v[2 * k + 1])};
        kFirst && k == 0 ? mma_from_zero(type, low[tile], a_rest, b0, b1) : mma(type, low[tile], a_rest, b0, b1);
        if constexpr (kGrown) {
          mma(type, low[tile], a, tf32_less(b[0], grown, b0), tf32_less(b[1], grown, b1));
        } else if constexpr (kProducts == 6) {
          const uint32_t rest0 = tf32_rest(b[0], b0), rest1 = tf32_rest(b[1], b1);
          const uint32_t less0 = tf32_less(b[0], -1.0f, b0), less1 = tf32_less(b[1], -1.0f, b1);
          const uint32_t a_last[4] = {last_bit(a_rest[0]), last_bit(a_rest[1]), last_bit(a_rest[2]),
                                      last_bit(a_rest[3])};
          mma(type, low[tile], a, less0, less1);
          mma(type, low[tile], a_rest, rest0, rest1);
          mma(type, low[tile], a, last_bit(less0), last_bit(less1));
          mma(type, low[tile], a_last, b0, b1);
        }
      }
    }
  };
  const auto give_back = [&](float part) {
#pragma unroll
    for (int j = 0; j < 4 * kTiles && !kGrown; ++j) low[j / 4][j % 4] -= part * result[j / 4][j % 4];
  };
  const auto add_unit = [&](auto is_first) {
    float w[2][2][4];
    stream.take(w);
    const float grown = less - 1.0f;
    less += 2.0f * cut_off;
    add_chunk(is_first, w[0], grown);
    give_back(2.0f * cut_off);
    add_chunk(std::false_type{}, w[1], grown);
  };
  const auto clear = [&] {
#pragma unroll
    for (int j = 0; j < 4 * kTiles; ++j) result[j / 4][j % 4] = low[j / 4][j % 4] = zero();
  };
  int units = plan.units[0];
  if constexpr (kOneForm) {
    clear();
  } else if (units > 0) {
    add_unit(std::true_type{});
    --units;
  } else {
    clear();
  }
#pragma unroll 1
  for (int part = 0;;) {
#pragma unroll 1
    for (; units > 0; --units) add_unit(std::false_type{});
    if (plan.half[part]) {
      float w[1][2][4];
      stream.take(w);
      add_chunk(std::false_type{}, w[0], less - 1.0f);
      give_back(cut_off);
      less += cut_off;
    }
    if (part || !plan.part[0].more) break;
    part = 1;
    units = plan.units[1];
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) result[j / 4][j % 4] = j < 4 * kTiles ? result[j / 4][j % 4] - low[j / 4][j % 4] : 0.0f;
}

// Recomputes a sum that was not finite, in plain order. Activations begin with part 0; part 1 follows in its own
// chunks.
template <bool kBackward, typename T, typename W>
__device__ inline float plain_sum(const LinearPlan<T, W>& plan, const float* activations, int row, int column) {
  const int in = plan.part[0].stride / static_cast<int>(sizeof(W)), depth = plan.part[0].depth;
  float sum = 0;
  if (column >= plan.part[0].columns) return sum;
#pragma unroll 1
  for (int k = 0; k < plan.terms; ++k) {
    const bool second = k >= depth;
    const int local = second ? k - depth : k, feature = second ? padded(depth) + local : k;
    const int64_t at = kBackward ? static_cast<int64_t>(k) * in + column : static_cast<int64_t>(column) * in + local;
    sum += get(activations, row, feature) * read_as<T>(plan.part[second].weight[at]);
  }
  return sum;
}

// One linear layer, for a warp that has columns of it. Calls emit(column, value, at) with value[2][2][2]: two pairs of
// neighbouring columns, from `column` and from `column` + pairs_apart on, of rows g and g + 8; columns beyond the layer
// are zeros. at: their place among the activations that begin at `to`.
template <bool kBackward>
constexpr int pairs_apart = kBackward ? 2 : 8;
template <typename T, typename W, bool kBackward, typename Emit>
__device__ inline void linear_layer(WeightStream<T, W, kBackward>& stream, const LinearPlan<T, W>& plan,
                                    const float* activations, float* to, Emit emit) {
  const int columns = plan.part[0].columns, lane = stream.lane;
  constexpr int kUsual = sizeof(T) == 4 ? 3 : 2;
  int column0 = stream.first_column;
  float* at = to + stream.place;
  do {
    float result[2][4];
    const int products = sizeof(T) == 4 ? plan.products : kUsual;
    if (products == kUsual) {
      if constexpr (kBackward || kOneForm) {
        multiply<kUsual, 2>(stream, activations, plan, result);
      } else if (column0 + 8 < columns) {
        multiply<kUsual, 2>(stream, activations, plan, result);
      } else {
        multiply<kUsual, 1>(stream, activations, plan, result);
      }
    } else if constexpr (sizeof(T) == 4) {
      if (products == 1) {
        multiply<1, 2>(stream, activations, plan, result);
      } else if constexpr (kFewTerms > 0) {
        multiply<6, 2>(stream, activations, plan, result);
      }
    }
    float value[2][2][2];  // [pair of columns][row g or g + 8]
    float sum = result[0][0];
#pragma unroll
    for (int j = 1; j < 8; ++j) sum += result[j / 4][j % 4];
    const int first = column0 + stream.own_column;
    constexpr int kApart = pairs_apart<kBackward>;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int pair = j / 4, half = j / 2 % 2, i = j % 2;
      value[pair][half][i] = kBackward ? result[i][2 * half + pair] : result[pair][2 * half + i];
    }
    if (!finite(sum)) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float& other = value[j / 4][j / 2 % 2][j % 2];
        if (finite(other)) continue;
        const int column = first + kApart * (j / 4) + j % 2, row = lane / 4 + 8 * (j / 2 % 2);
        other = plain_sum<kBackward>(plan, activations, row, column);
      }
    }
    emit(first, value, at);
    column0 += kStackWarps * kPairColumns;
    at += kStackWarps * kPairColumns * (kChunkFloats / kDepthStep);
  } while (column0 < columns);
}

}  // namespace fastmod::cuda
