// Products of matrices of any size for the linear layers of MFNNRs that smfr.cu cannot handle: for the forward, for the
// gradient of the input and for that of the weight. On tensor cores as in smfr.cuh; plain sums for fp64.
//
// A block has a tile of the result. Its eight warps share the tile, and the warps of one part of it share the depth, 16
// at a time. Tiles are small, so that a batch of 128 keeps a GPU busy; the warps' sums are added up in a fixed order.
#pragma once

#include "rows.cuh"
#include "smfr.cuh"

namespace fastmod::cuda {

enum ProductKind : int { kOfInput, kOfGrads, kOfWeight };  // input W^T, grads W, grads^T input

constexpr int kProductThreads = 256;

// The layout of a tile of one kind. In shared memory a factor is either "along", [row or column of the result][depth],
// or [depth][row or column], as in global memory.
template <typename T, typename W, int kKind>
struct ProductTile {
  using C = Compute<T>;
  using Left = C;
  using Right = std::conditional_t<kKind == kOfWeight, C, W>;
  using RightAs = std::conditional_t<kKind == kOfWeight, C, T>;  // the type it is treated as
  static constexpr bool kPlain = sizeof(C) == 8;
  static constexpr bool kLeftAlong = kKind != kOfWeight, kRightAlong = kKind == kOfInput;
  static constexpr bool kExactRight = sizeof(RightAs) == 2;  // tf32 holds 16-bit numbers exactly
  static constexpr int kRowTiles = kKind == kOfWeight ? 2 : 1, kColumnTiles = 4;  // per warp, of 16 and of 8
  static constexpr int kDown = 2, kAcross = kKind == kOfWeight ? 2 : 1;           // warps
  static constexpr int kShares = kProductThreads / kWarp / (kDown * kAcross);     // warps that share the depth
  static constexpr int kRows = kDown * kRowTiles * 16, kColumns = kAcross * kColumnTiles * 8, kDepth = 16 * kShares;
  static constexpr int kStages = kPlain ? 1 : 2;
  // So that lanes of a fragment use different banks and rows are aligned to 16 bytes.
  static constexpr int kLeftPitch = kLeftAlong ? kDepth + (kPlain ? 2 : 16) : kRows + 8;
  static constexpr int kRightPitch = kRightAlong ? kDepth + (kPlain ? 2 : 16) : kColumns + 8;
  static constexpr int kSumPitch = kColumns + 8;
  static constexpr int kLeftSize = (kLeftAlong ? kRows : kDepth) * kLeftPitch;
  static constexpr int kRightSize = (kRightAlong ? kColumns : kDepth) * kRightPitch;
  static constexpr int kStageBytes = kLeftSize * sizeof(Left) + kRightSize * sizeof(Right);
  static constexpr int kSumBytes = (kShares - 1) * kRows * kSumPitch * static_cast<int>(sizeof(C));
  static constexpr int kBytes = kStages * kStageBytes > kSumBytes ? kStages * kStageBytes : kSumBytes;
  static_assert(kBytes <= 47 * 1024 && kStageBytes % 16 == 0 && kLeftSize * sizeof(Left) % 16 == 0, "shared memory");
};

// ---- global to shared memory

// A lane multiplies four neighbours of the depth. If rows are the depth, they are stored 4 rows apart to avoid bank
// conflicts.
__device__ inline int dealt(int row) { return (row & ~15) | (row & 3) << 2 | (row >> 2 & 3); }

template <int kMany, typename From, typename E>
__device__ inline void copy_many(E* to, const From* address, bool inside) {
  if constexpr (sizeof(From) == sizeof(E) && kMany * sizeof(E) >= 4) {
    copy_async<kMany * static_cast<int>(sizeof(E))>(to, address, inside);
  } else if constexpr (sizeof(From) == sizeof(E)) {
    narrow(0.0f, to);
    if (inside) *to = *address;
  } else if constexpr (kMany == 4) {
    Four32 four{};
    if (inside) {
      const auto read = *reinterpret_cast<const Four<From>*>(address);
#pragma unroll
      for (int i = 0; i < 4; ++i) four.v[i] = widen(read.v[i]);
    }
    *reinterpret_cast<Four32*>(to) = four;
  } else {
    *to = inside ? widen(*address) : 0.0f;
  }
}

// fp32 that is treated as rounded to T.
template <int kMany, typename T>
__device__ inline void copy_rounded(float* to, const float* address, bool inside) {
  Four32 four{};
  if (inside && kMany == 4) four = *reinterpret_cast<const Four32*>(address);
  if (inside && kMany == 1) four.v[0] = *address;
#pragma unroll
  for (int i = 0; i < kMany; ++i) four.v[i] = rounded<T>(four.v[i]);
  if constexpr (kMany == 4) {
    *reinterpret_cast<Four32*>(to) = four;
  } else {
    *to = four.v[0];
  }
}

// Loads kRows x kColumns of a matrix at (row0, column0), zeros beyond it.
template <int kRows, int kColumns, int kPitch, bool kDeal, int kMany, typename T, typename E>
__device__ inline void load_by(const Joined<T>& from, int64_t row0, int64_t rows, int column0, E* to) {
  constexpr int kEach = kColumns / kMany;
  const int rest = from.width - from.first;
#pragma unroll 1
  for (int i = threadIdx.x; i < kRows * kEach; i += kProductThreads) {
    const int row = i / kEach, column = i % kEach * kMany, at = column0 + column;
    const bool inside = row0 + row < rows && at < from.width;
    E* place = to + (kDeal ? dealt(row) : row) * kPitch + column;
    if constexpr (sizeof(E) == sizeof(Compute<T>)) {
      if (at < from.first || rest == 0) {
        copy_many<kMany>(place, inside ? from.wide + (row0 + row) * from.first + at : from.wide, inside);
        continue;
      }
    }
    const int64_t place_of = inside ? (row0 + row) * rest + at - from.first : 0;
    if constexpr (sizeof(T) < sizeof(E)) {
      if (from.narrow.wide) {
        copy_rounded<kMany, T>(place, static_cast<const float*>(from.narrow.first) + place_of, inside);
        continue;
      }
    }
    copy_many<kMany>(place, static_cast<const T*>(from.narrow.first) + place_of, inside);
  }
}
template <int kRows, int kColumns, int kPitch, bool kDeal, typename T, typename E>
__device__ inline void load_block(const Joined<T>& from, bool whole, int64_t row0, int64_t rows, int64_t column0,
                                  E* to) {
  constexpr int kMany = 16 / sizeof(E);
  const int column = static_cast<int>(column0);
  if (whole) return load_by<kRows, kColumns, kPitch, kDeal, kMany>(from, row0, rows, column, to);
  load_by<kRows, kColumns, kPitch, kDeal, 1>(from, row0, rows, column, to);
}

// Whether every 16 bytes of shared memory can be filled at once.
template <typename E, typename T>
__device__ inline bool by_sixteen(const Joined<T>& m) {
  constexpr int kMany = 16 / sizeof(E);
  const int rest = m.width - m.first;
  return m.first % kMany == 0 && rest % kMany == 0 && reinterpret_cast<uintptr_t>(m.wide) % 16 == 0 &&
         reinterpret_cast<uintptr_t>(m.narrow.first) % (kMany * (m.narrow.wide ? 4 : sizeof(T))) == 0;
}

// ---- products of factors in shared memory

// Reads, as type As, the four of sixteen depths of row or column `index` that lane % 4 == t multiplies.
template <bool kAlong, int kPitch, typename As, typename E>
__device__ inline void read_depths(const E* tile, int index, int k0, int t, float (&v)[4]) {
  if constexpr (kAlong) {
    const auto four = *reinterpret_cast<const Four<E>*>(tile + index * kPitch + k0 + 4 * t);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = read_as<As>(four.v[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = read_as<As>(tile[(k0 + 4 * i + t) * kPitch + index]);
  }
}

// A warp's part of the sums, in the layout of d in mma.cuh. low: terms much smaller than total, see kCutOff.
template <typename C, int kRowTiles, int kColumnTiles>
struct Sums {
  C total[kRowTiles][kColumnTiles][4] = {}, low[kRowTiles][kColumnTiles][4] = {};
};

// Over 16 depths from k0 on. row0, column0: of the warp in the tile.
template <typename P, typename S>
__device__ inline void multiply_tensor(const typename P::Left* left, const typename P::Right* right, int row0,
                                       int column0, int k0, bool precise, bool few, S& sums) {
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  float a[P::kRowTiles][2][4], b[P::kColumnTiles][4];
#pragma unroll
  for (int i = 0; i < 2 * P::kRowTiles; ++i) {
    read_depths<P::kLeftAlong, P::kLeftPitch, typename P::Left>(left, row0 + 8 * i + g, k0, t, a[i / 2][i % 2]);
  }
#pragma unroll
  for (int j = 0; j < P::kColumnTiles; ++j) {
    read_depths<P::kRightAlong, P::kRightPitch, typename P::RightAs>(right, column0 + 8 * j + g, k0, t, b[j]);
  }
  float* type = nullptr;
#pragma unroll
  for (int k = 0; k < 4; k += 2) {
#pragma unroll
    for (int i = 0; i < P::kRowTiles; ++i) {
      uint32_t high[4], rest[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float value = a[i][e % 2][k + e / 2];
        high[e] = tf32_bits(value);
        rest[e] = tf32_rest(value, high[e]);
      }
#pragma unroll
      for (int j = 0; j < P::kColumnTiles; ++j) {
        const float b0 = b[j][k], b1 = b[j][k + 1];
        const uint32_t high0 = P::kExactRight ? __float_as_uint(b0) : tf32_bits(b0);
        const uint32_t high1 = P::kExactRight ? __float_as_uint(b1) : tf32_bits(b1);
        float part[4];
        mma_from_zero(type, part, high, high0, high1);
        float(&low)[4] = sums.low[i][j];
        if (precise) {
          mma(type, low, rest, high0, high1);
          if constexpr (!P::kExactRight) {
            const uint32_t rest0 = tf32_rest(b0, high0), rest1 = tf32_rest(b1, high1);
            mma(type, low, high, rest0, rest1);
            if (few) {
              const uint32_t last[4] = {last_bit(rest[0]), last_bit(rest[1]), last_bit(rest[2]), last_bit(rest[3])};
              mma(type, low, rest, rest0, rest1);
              mma(type, low, high, last_bit(rest0), last_bit(rest1));
              mma(type, low, last, high0, high1);
            }
          }
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          sums.total[i][j][e] += part[e];
          low[e] += kCutOff * part[e];
        }
      }
    }
  }
}

template <typename P, typename S>
__device__ inline void multiply_plain(const typename P::Left* left, const typename P::Right* right, int row0,
                                      int column0, int k0, S& sums) {
  using C = typename P::C;
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
#pragma unroll 1
  for (int k = k0; k < k0 + 16; ++k) {
    C a[2 * P::kRowTiles], b[2 * P::kColumnTiles];
#pragma unroll
    for (int i = 0; i < 2 * P::kRowTiles; ++i) {
      const int row = row0 + 8 * i + g;
      a[i] = left[P::kLeftAlong ? row * P::kLeftPitch + k : dealt(k) * P::kLeftPitch + row];
    }
#pragma unroll
    for (int j = 0; j < 2 * P::kColumnTiles; ++j) {
      const int column = column0 + j / 2 * 8 + 2 * t + j % 2;
      b[j] = right[P::kRightAlong ? column * P::kRightPitch + k : dealt(k) * P::kRightPitch + column];
    }
#pragma unroll
    for (int i = 0; i < P::kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < P::kColumnTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums.total[i][j][e] += a[2 * i + e / 2] * b[2 * j + e % 2];
      }
    }
  }
}

// ---- a tile

// left, right: the factors as matrices in memory; left_rows and right_rows are their rows unless those are the depth.
// The tile begins at row0 and column0 of the result. each(left) is called whenever kDepth more of the depth has
// arrived; emit(row, column, value) for every place of the tile, some of which may be beyond the result. A value that
// is not finite is not to be trusted.
template <typename P, typename T, typename R, typename Each, typename Emit>
__device__ inline void product_tile(const Joined<T>& left, int64_t left_rows, const Joined<R>& right,
                                    int64_t right_rows, int64_t depth, int64_t row0, int64_t column0, bool precise,
                                    Each each, Emit emit) {
  using C = typename P::C;
  FASTMOD_SHARED(uint4, memory, P::kBytes / 16 + 1);
  const auto left_at = [&](int64_t step) {
    auto* stage = reinterpret_cast<unsigned char*>(memory) + step % P::kStages * P::kStageBytes;
    return reinterpret_cast<typename P::Left*>(stage);
  };
  const auto right_at = [&](int64_t step) {
    return reinterpret_cast<typename P::Right*>(left_at(step) + P::kLeftSize);
  };
  const bool left_whole = by_sixteen<typename P::Left>(left), right_whole = by_sixteen<typename P::Right>(right);
  const auto load = [&](int64_t step) {
    const int64_t k0 = step * P::kDepth;
    if constexpr (P::kLeftAlong) {
      load_block<P::kRows, P::kDepth, P::kLeftPitch, false>(left, left_whole, row0, left_rows, k0, left_at(step));
    } else {
      load_block<P::kDepth, P::kRows, P::kLeftPitch, true>(left, left_whole, k0, left_rows, row0, left_at(step));
    }
    if constexpr (P::kRightAlong) {
      load_block<P::kColumns, P::kDepth, P::kRightPitch, false>(right, right_whole, column0, right_rows, k0,
                                                                right_at(step));
    } else {
      load_block<P::kDepth, P::kColumns, P::kRightPitch, true>(right, right_whole, k0, right_rows, column0,
                                                               right_at(step));
    }
    commit_copies();
  };

  const int warp = static_cast<int>(threadIdx.x) / kWarp, share = warp / (P::kDown * P::kAcross);
  const int part = warp % (P::kDown * P::kAcross);
  const int warp_row = part / P::kAcross * P::kRowTiles * 16, warp_column = part % P::kAcross * P::kColumnTiles * 8;
  const bool few = kFewTerms > 0 && depth <= kFewTerms;
  Sums<C, P::kRowTiles, P::kColumnTiles> sums;
  const int64_t steps = (depth + P::kDepth - 1) / P::kDepth;
  load(0);
  for (int64_t step = 0; step < steps; ++step) {
    wait_copies<0>();
    __syncthreads();  // these have arrived; the previous ones are no longer needed
    if (P::kStages > 1 && step + 1 < steps) load(step + 1);
    each(left_at(step));
    if (step * P::kDepth + share * 16 < depth) {
      if constexpr (P::kPlain) {
        multiply_plain<P>(left_at(step), right_at(step), warp_row, warp_column, share * 16, sums);
      } else {
        multiply_tensor<P>(left_at(step), right_at(step), warp_row, warp_column, share * 16, precise, few, sums);
      }
    }
    if (P::kStages == 1 && step + 1 < steps) {
      __syncthreads();
      load(step + 1);
    }
  }

  __syncthreads();  // the stages are free and can take the sums
  C* const kept = reinterpret_cast<C*>(memory);
  const int lane = threadIdx.x % kWarp;
  const auto place = [&](int slot, int i, int j, int half) {
    return kept + (slot * P::kRows + warp_row + 16 * i + 8 * half + lane / 4) * P::kSumPitch + warp_column + 8 * j +
           lane % 4 * 2;
  };
  const auto for_pairs = [&](auto run) {
#pragma unroll
    for (int i = 0; i < P::kRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < P::kColumnTiles; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          C(&total)[4] = sums.total[i][j];
          run(i, j, half, total[2 * half], total[2 * half + 1]);
        }
      }
    }
  };
#pragma unroll
  for (int i = 0; i < P::kRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < P::kColumnTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums.total[i][j][e] += sums.low[i][j][e];
    }
  }
  if (share > 0) {
    for_pairs([&](int i, int j, int half, C& first, C& second) {
      C* to = place(share - 1, i, j, half);
      to[0] = first;
      to[1] = second;
    });
  }
  __syncthreads();
  if (share == 0) {
    for_pairs([&](int i, int j, int half, C& first, C& second) {
#pragma unroll
      for (int slot = 0; slot < P::kShares - 1; ++slot) {
        const C* from = place(slot, i, j, half);
        first += from[0];
        second += from[1];
      }
      C* to = place(0, i, j, half);
      to[0] = first;
      to[1] = second;
    });
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < P::kRows * P::kColumns; i += kProductThreads) {
    const int row = i / P::kColumns, column = i % P::kColumns;
    emit(row0 + row, static_cast<int>(column0) + column, kept[row * P::kSumPitch + column]);
  }
}

// False if the sum is not finite: its factors were split into two parts, which for non-finite factors gives NaN.
template <typename C>
__device__ inline bool trusted(C value) {
  return sizeof(C) == 8 || value - value == C(0);
}

template <typename T>
__device__ inline Compute<T> entry(const Joined<T>& m, int64_t row, int column) {
  return column < m.first ? m.wide[row * m.first + column]
                          : read_at(m.narrow, row * (m.width - m.first) + column - m.first);
}

}  // namespace fastmod::cuda
