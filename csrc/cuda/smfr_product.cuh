// Products of activations and weights of a stack on tensor cores. See smfr.cuh.
#pragma once

#include "smfr_stream.cuh"

namespace fastmod::cuda {

// ---- products

// Tensor cores cut sums off where an adder would round them: each product costs half a unit of the last place, on average
// this part of the sum, which is given back. What is left is as good as rounding.
constexpr float kCutOff = 0.72f / 16777216.0f;
constexpr int kExactDepth = 4;  // sums of so few products lose nothing, or nearly so
// Sums of so few products, in which nothing averages out, are given three more: of the low parts, and of the last bit of
// each factor, which tensor cores do not look at.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kFewProducts = 0;  // there factors are whole, see mma_by_shuffles
#else
constexpr int kFewProducts = 32;
#endif
__device__ inline uint32_t last_bit(uint32_t rest) { return tf32_rest(__uint_as_float(rest), rest & 0xffffe000u); }

struct alignas(16) Four32 {
  float v[4];
};

// sum of activations [row][k] times weights, for 16 columns: result[tile][as mma.cuh has d]. kProducts of high and low
// parts: weights of 16 bits have no low part.
template <int kProducts, typename T, typename W, bool kBackward>
__device__ inline void multiply(WeightStream<T, W, kBackward>& stream, const float* activations, int chunks, int both,
                                float cut_off, float (&result)[2][4]) {
  constexpr bool kSplit = sizeof(T) == 4;
  const auto* from = reinterpret_cast<const Four32*>(activations) + stream.lane;
  float low[2][4];
  const auto add_chunk = [&](auto is_first) {
    constexpr bool kFirst = decltype(is_first)::value;
    float w[2][4];
    stream.take(w);
    const Four32 high[2] = {from[0], from[kLow / 8]}, rest[2] = {from[kLow / 4], from[kLow / 4 + kLow / 8]};
    from += kChunkFloats / 4;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      if (!kBackward && tile == 1 && !both) {
#pragma unroll
        for (int j = 0; j < 4 && kFirst; ++j) result[1][j] = low[1][j] = 0.0f;
        break;
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float b[2] = {kBackward ? w[k][tile] : w[tile][2 * k], kBackward ? w[k][2 + tile] : w[tile][2 * k + 1]};
        const uint32_t a[4] = {__float_as_uint(high[0].v[2 * k]), __float_as_uint(high[1].v[2 * k]),
                               __float_as_uint(high[0].v[2 * k + 1]), __float_as_uint(high[1].v[2 * k + 1])};
        const uint32_t b0 = kSplit ? tf32_bits(b[0]) : __float_as_uint(b[0]);
        const uint32_t b1 = kSplit ? tf32_bits(b[1]) : __float_as_uint(b[1]);
        float* type = nullptr;
        if constexpr (kProducts == 1) {
#pragma unroll
          for (int j = 0; j < 4 && kFirst && k == 0; ++j) low[tile][j] = 0.0f;
        }
        kFirst && k == 0 ? mma_from_zero(type, result[tile], a, b0, b1) : mma(type, result[tile], a, b0, b1);
        if constexpr (kProducts > 1) {
          const uint32_t a_rest[4] = {__float_as_uint(rest[0].v[2 * k]), __float_as_uint(rest[1].v[2 * k]),
                                      __float_as_uint(rest[0].v[2 * k + 1]), __float_as_uint(rest[1].v[2 * k + 1])};
          kFirst && k == 0 ? mma_from_zero(type, low[tile], a_rest, b0, b1) : mma(type, low[tile], a_rest, b0, b1);
          if constexpr (kSplit) {
            const uint32_t b0_rest = tf32_rest(b[0], b0), b1_rest = tf32_rest(b[1], b1);
            mma(type, low[tile], a, b0_rest, b1_rest);
            if constexpr (kProducts == 6) {
              const uint32_t a_last[4] = {last_bit(a_rest[0]), last_bit(a_rest[1]), last_bit(a_rest[2]),
                                          last_bit(a_rest[3])};
              mma(type, low[tile], a_rest, b0_rest, b1_rest);
              mma(type, low[tile], a, last_bit(b0_rest), last_bit(b1_rest));
              mma(type, low[tile], a_last, b0, b1);
            }
          }
        }
      }
    }
  };
  // What two chunks cut off is given back at once, by the sum between them; of the last of an odd number, by itself.
  const auto give_back = [&](float share) {
#pragma unroll
    for (int j = 0; j < 8; ++j) low[j / 4][j % 4] += share * result[j / 4][j % 4];
  };
  add_chunk(std::true_type{});
#pragma unroll 1
  for (int left = chunks - 1; left > 0; left -= 2) {
    give_back(cut_off + cut_off);
    add_chunk(std::false_type{});
    if (left > 1) add_chunk(std::false_type{});
  }
  if (chunks % 2) give_back(cut_off);
#pragma unroll
  for (int j = 0; j < 8; ++j) result[j / 4][j % 4] += low[j / 4][j % 4];
}

// Again, in the plain order, what came out not finite. Activations begin with part 0, part 1 follows in chunks of its own.
template <bool kBackward, typename T, typename W>
__device__ inline float plain_sum(const LinearPlan<T, W>& plan, const float* activations, int row, int column) {
  const int in = plan.part[0].in, depth = plan.part[0].depth;
  float sum = 0;
  if (column >= plan.part[0].columns) return sum;
#pragma unroll 1
  for (int k = 0; k < plan.products; ++k) {
    const bool second = k >= depth;
    const int local = second ? k - depth : k, feature = second ? padded(depth) + local : k;
    const int64_t at = kBackward ? static_cast<int64_t>(k) * in + column : static_cast<int64_t>(column) * in + local;
    sum += get(activations, row, feature) * read_as<T>(plan.part[second].weight[at]);
  }
  return sum;
}

// One linear layer: emit(column, value, at) for value[2][2][2], two pairs of neighbouring columns, from `column` and
// from `column` + pairs_apart on, of rows g and g + 8: those of the last 16 columns that lie beyond the layer are zeros.
// at: where they lie among activations that begin at `to`.
template <bool kBackward>
constexpr int pairs_apart = kBackward ? 2 : 8;
template <typename T, typename W, bool kBackward, typename Emit>
__device__ inline void linear_layer(WeightStream<T, W, kBackward>& stream, int linear, bool precise,
                                    const float* activations, float* to, Emit emit) {
  const LinearPlan<T, W>& plan = stream.plans[linear];
  const int columns = plan.part[0].columns, lane = stream.lane, chunks = plan.chunks, products = plan.products;
  constexpr int kEach = kBackward ? 4 : 2;  // from one lane's columns to the next one's
  const int own = stream.t4 * kEach / 4, place = stream.g * kDepthStep + own;
  const float cut_off = products <= kExactDepth ? 0.0f : 2.0f * kCutOff;
  for (int column0 = stream.first_column; column0 < columns; column0 += kStackWarps * kPairColumns) {
    float result[2][4];
    const int both = kept(static_cast<int>(column0 + 8 < columns));
    if constexpr (sizeof(T) == 4) {
      if (!precise) {
        multiply<1>(stream, activations, chunks, both, cut_off, result);
      } else if (kFewProducts > 0 && products <= kFewProducts) {
        multiply<6>(stream, activations, chunks, both, cut_off, result);
      } else {
        multiply<3>(stream, activations, chunks, both, cut_off, result);
      }
    } else {
      multiply<2>(stream, activations, chunks, both, cut_off, result);
    }
    float value[2][2][2];  // [pair of columns][row g or g + 8]
    float sum = result[0][0];
#pragma unroll
    for (int j = 1; j < 8; ++j) sum += result[j / 4][j % 4];
    const int first = column0 + own;
    float* const at = to + column0 * (kChunkFloats / kDepthStep) + place;
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
  }
}

}  // namespace fastmod::cuda
