// What the two launches that take rows through a whole stack of MFNNRs share: activations in shared memory, weights that
// stream past them, and their products on tensor cores.
//
// A block has kTileRows rows, which is one tile of a product, so that every weight is used once per block, by one warp,
// and each lane copies just those that it will multiply itself: they wait in its own slots, no barrier is needed, and
// the copies run ahead of the products over the borders of layers. Warps share the columns of a layer, 16 at a time.
#pragma once

#include "mma.cuh"
#include "multiplex.cuh"
#include "reduce.cuh"

namespace fastmod::cuda {

constexpr int kStackThreads = 256;
constexpr int kStackWarps = kStackThreads / kWarp;
constexpr int kStages = 3;        // units of weights under way for each lane
constexpr int kDepthStep = 16;    // inputs of a unit
constexpr int kPairColumns = 16;  // columns of a unit: two tiles of 8
constexpr int kThreadsOfRow = kStackThreads / kTileRows;  // row-wise work: half a warp has a row
static_assert(kThreadsOfRow == 16 && kTileRows == 16, "a row belongs to one warp: __syncwarp orders its threads");

// ---- activations: [chunk][high, low][row][16 features], so that a lane reads four neighbours of a row at once

constexpr int kChunkFloats = 2 * kTileRows * kDepthStep, kLow = kTileRows * kDepthStep;

__host__ __device__ inline int chunks_of(int features) { return (features + kDepthStep - 1) / kDepthStep; }

__device__ inline int place_of(int row, int feature) {
  return feature / kDepthStep * kChunkFloats + row * kDepthStep + feature % kDepthStep;
}

__device__ inline bool finite(float value) { return value - value == 0.0f; }

// high + low == value, and tensor cores read all of low but its last bit at most. What is not finite makes a sum that is
// not finite, which is then computed anew.
__device__ inline void split_exactly(float value, float* high, float* low) {
  *high = __uint_as_float(tf32_bits(value));
  *low = value - *high;
  if (!finite(*low)) {
    *high = finite(value) ? __uint_as_float(__float_as_uint(value) & 0xffffe000u) : value;  // close to overflow, or inf
    *low = finite(value) ? value - *high : value;
  }
}
__device__ inline void put(float* activations, int row, int feature, float value) {
  float* at = activations + place_of(row, feature);
  split_exactly(value, at, at + kLow);
}
__device__ inline float get(const float* activations, int row, int feature) {
  const float* at = activations + place_of(row, feature);
  return at[0] + at[kLow];
}

// ---- the order in which weights are used

// One linear layer as a warp meets it: `columns` results, sums of `depth` products. Forward, feature f of the activations
// meets input f + before of the weight if f < border, else f + after: update FNNs read [routed ; x], while x comes first
// in shared memory.
struct Step {
  int columns, depth, border, before, after;
};

template <typename T, bool kBackward>
__device__ inline Step step_of(const Stack<T>& s, int linear, bool need_x) {
  const int per_layer = s.route + s.update, layer = linear / per_layer, i = linear - layer * per_layer;
  const int in = s.linear[linear].in, out = s.linear[linear].out;
  if constexpr (kBackward) {
    const bool alone = i == s.route && layer == 0 && !need_x;  // the gradient of x is not wanted
    return {alone ? s.layer[0].n * s.d : in, out, 0, 0, 0};
  } else {
    const int routed = s.layer[layer].n * s.d;
    return i == s.route && s.context ? Step{out, in, in - routed, routed, routed - in} : Step{out, in, 0, 0, 0};
  }
}

template <typename T>
struct alignas(4 * sizeof(T)) Weights4 {
  T v[4];
};
template <typename T>
constexpr int kSlotBytes = kStages * 2 * kStackThreads * static_cast<int>(sizeof(Weights4<T>));

// Copies the units of weights that this lane will need. Unit: forward [two tiles][four inputs] of column g of each tile,
// backward [two k steps][two rows of the weight][two neighbouring columns].
template <typename T, bool kBackward>
struct WeightStream {
  const Stack<T>& s;
  Weights4<T>* slots;  // [stage][half][thread]
  bool need_x;
  int linear, end, stage, column, chunk;
  Step step;
  const T* row;  // of the weight, at this lane's first input or column
  bool whole;    // neighbours can be copied at once

  __device__ WeightStream(const Stack<T>& stack, void* memory, int first, int end_, bool need_x_)
      : s(stack), slots(static_cast<Weights4<T>*>(memory)), need_x(need_x_), linear(first), end(end_), stage(0) {
    enter();
    for (int i = 0; i < kStages; ++i) next();
  }
  __device__ bool done() const { return linear == end; }

  // The first linear layer from here on in which this warp has columns.
  __device__ void enter() {
    column = static_cast<int>(threadIdx.x) / kWarp * kPairColumns;
    for (; linear != end; linear += kBackward ? -1 : 1) {
      step = step_of<T, kBackward>(s, linear, need_x);
      if (column < step.columns) break;
    }
    if (!done()) begin();
  }
  __device__ void begin() {
    const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4, in = s.linear[linear].in;
    const T* weight = s.linear[linear].weight;
    constexpr int kTogether = kBackward ? 2 : 4;
    whole = in % kTogether == 0 && step.border % kTogether == 0 && step.columns % (kBackward ? 2 : 1) == 0 &&
            reinterpret_cast<uintptr_t>(weight) % (kTogether * sizeof(T)) == 0;
    row = kBackward ? weight + static_cast<int64_t>(4 * t) * in + column + 2 * g
                    : weight + static_cast<int64_t>(column + g) * in;
    chunk = 0;
  }

  template <int kCount>
  __device__ void copy(T* to, const T* from, bool inside) const {
    if constexpr (kCount * sizeof(T) >= 4) {
      copy_async<kCount * static_cast<int>(sizeof(T))>(to, inside ? from : s.linear[linear].weight, inside);
    } else {
      if (inside) {
        *to = *from;
      } else {
        narrow(0.0f, to);
      }
    }
  }

  // Starts the copy of the next unit, into the slot whose unit was read last.
  __device__ void next() {
    if (!done()) {
      const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4, in = s.linear[linear].in;
      Weights4<T>* to = slots + stage * 2 * kStackThreads + threadIdx.x;
      const int k = chunk * kDepthStep + 4 * t;
      if constexpr (kBackward) {
        const int first = column + 2 * g;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          T* pair = to[i / 2 * kStackThreads].v + i % 2 * 2;
          const bool inside = k + i < step.depth;
          if (whole) {
            copy<2>(pair, row + static_cast<int64_t>(i) * in, inside && first < step.columns);
          } else {
            copy<1>(pair, row + static_cast<int64_t>(i) * in, inside && first < step.columns);
            copy<1>(pair + 1, row + static_cast<int64_t>(i) * in + 1, inside && first + 1 < step.columns);
          }
        }
        row += static_cast<int64_t>(kDepthStep) * in;
      } else {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          const bool there = column + 8 * tile + g < step.columns;
          const T* from = row + static_cast<int64_t>(8 * tile) * in;
          T* four = to[tile * kStackThreads].v;
          if (whole) {
            copy<4>(four, from + k + (k < step.border ? step.before : step.after), there && k < step.depth);
          } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              copy<1>(four + i, from + k + i + (k + i < step.border ? step.before : step.after),
                      there && k + i < step.depth);
            }
          }
        }
      }
      if (++chunk == chunks_of(step.depth)) {
        column += kStackWarps * kPairColumns;
        if (column < step.columns) {
          begin();
        } else {
          linear += kBackward ? -1 : 1;
          enter();
        }
      }
    }
    commit_copies();
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }

  // The oldest unit, whose place the next one takes.
  __device__ void take(float (&w)[2][4]) {
    wait_copies<kStages - 1>();
    const Weights4<T>* from = slots + stage * 2 * kStackThreads + threadIdx.x;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Weights4<T> four = from[half * kStackThreads];
#pragma unroll
      for (int i = 0; i < 4; ++i) w[half][i] = widen(four.v[i]);
    }
    next();
  }
};

// ---- products

struct alignas(16) Four32 {
  float v[4];
};

// sum of activations [row][k] times weights, for 16 columns: result[tile][as mma.cuh has d].
template <typename T, bool kBackward>
__device__ inline void multiply(WeightStream<T, kBackward>& stream, const float* activations, int depth, bool both,
                                float (&result)[2][4]) {
  constexpr bool kSplit = sizeof(T) == 4;
  const bool precise = !kSplit || stream.s.precise;
  const int lane = threadIdx.x % kWarp;
  const auto* from = reinterpret_cast<const Four32*>(activations) + lane;
  float low[2][4] = {};
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (int j = 0; j < 4; ++j) result[tile][j] = 0.0f;
  }
#pragma unroll 1
  for (int chunk = chunks_of(depth); chunk > 0; --chunk, from += kChunkFloats / 4) {
    float w[2][4];
    stream.take(w);
    const Four32 high[2] = {from[0], from[kLow / 8]}, rest[2] = {from[kLow / 4], from[kLow / 4 + kLow / 8]};
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      if (!kBackward && tile == 1 && !both) break;
      float part[4] = {};  // tensor cores cut sums off: those of a unit are added up by hand
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float b[2] = {kBackward ? w[k][tile] : w[tile][2 * k], kBackward ? w[k][2 + tile] : w[tile][2 * k + 1]};
        const uint32_t a[4] = {__float_as_uint(high[0].v[2 * k]), __float_as_uint(high[1].v[2 * k]),
                               __float_as_uint(high[0].v[2 * k + 1]), __float_as_uint(high[1].v[2 * k + 1])};
        const uint32_t b0 = kSplit ? tf32_bits(b[0]) : __float_as_uint(b[0]);
        const uint32_t b1 = kSplit ? tf32_bits(b[1]) : __float_as_uint(b[1]);
        float* type = nullptr;
        mma(type, part, a, b0, b1);
        if (precise) {
          const uint32_t a_rest[4] = {__float_as_uint(rest[0].v[2 * k]), __float_as_uint(rest[1].v[2 * k]),
                                      __float_as_uint(rest[0].v[2 * k + 1]), __float_as_uint(rest[1].v[2 * k + 1])};
          mma(type, low[tile], a_rest, b0, b1);
          if constexpr (kSplit) {
            mma(type, low[tile], a, __float_as_uint(b[0] - __uint_as_float(b0)),
                __float_as_uint(b[1] - __uint_as_float(b1)));
          }
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) result[tile][j] += part[j];
    }
  }
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
    for (int j = 0; j < 4; ++j) result[tile][j] += low[tile][j];
  }
}

// One linear layer: emit(row, column, first, second) for every pair of neighbouring columns, those of the last 16 that
// lie beyond `columns` being zeros. Sums that are not finite are computed anew, in the plain order.
template <typename T, bool kBackward, typename Emit>
__device__ inline void linear_layer(WeightStream<T, kBackward>& stream, int linear, const float* activations,
                                    Emit emit) {
  const Stack<T>& s = stream.s;
  const Step step = step_of<T, kBackward>(s, linear, stream.need_x);
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4, in = s.linear[linear].in;
  const T* weight = s.linear[linear].weight;
  for (int column0 = static_cast<int>(threadIdx.x) / kWarp * kPairColumns; column0 < step.columns;
       column0 += kStackWarps * kPairColumns) {
    float result[2][4];
    multiply(stream, activations, step.depth, column0 + 8 < step.columns, result);
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = g + 8 * half, column = column0 + (kBackward ? 4 * t + 2 * pair : 8 * pair + 2 * t);
        float value[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          value[i] = kBackward ? result[i][2 * half + pair] : result[pair][2 * half + i];
          if (finite(value[i]) || column + i >= step.columns) continue;
          value[i] = 0.0f;
#pragma unroll 1
          for (int k = 0; k < step.depth; ++k) {
            const int other = k + (k < step.border ? step.before : step.after);
            const int64_t at = kBackward ? static_cast<int64_t>(k) * in + column + i
                                         : static_cast<int64_t>(column + i) * in + other;
            value[i] += get(activations, row, k) * widen(weight[at]);
          }
        }
        emit(row, column, value[0], value[1]);
      }
    }
  }
}

// ---- routing of one column, (row, n), over m

struct RoutingColumn {
  struct Extremes {
    float top, sum;
    int chosen;
  };
  int mode;
  float tau;
  int64_t seed;

  template <typename T>
  __device__ RoutingColumn(int mode_, const StackLayer<T>& layer) : mode(mode_) {
    tau = layer.tau ? *layer.tau : layer.tau_value;
    if (!(tau > 0.0f)) tau = NAN;  // as in multiplex.cuh
    seed = layer.seed ? *layer.seed : layer.seed_value;
  }
  // Logits -> scores, in place; stride: from one m to the next, in memory and in the noise, which begins at `index`.
  __device__ Extremes scores(float* column, int count, int stride, int64_t index) const {
    Extremes found{-INFINITY, 0.0f, 0};
    for (int m = 0; m < count; ++m) {
      float value = column[m * stride];
      if (mode == kGumbel) value += gumbel_at<float>(seed, index + static_cast<int64_t>(m) * stride);
      value /= tau;
      column[m * stride] = value;
      if (value > found.top || value != value) {  // a NaN stays the maximum, as in torch
        found.top = value;
        found.chosen = m;
      }
    }
    for (int m = 0; m < count; ++m) found.sum += exponential(column[m * stride] - found.top);
    return found;
  }
  __device__ float soft(float score, const Extremes& found) const { return exponential(score - found.top) / found.sum; }
  // One-hot, or NaN throughout where the softmax would be: top - top is NaN for a NaN or an infinity.
  __device__ float forward_weight(float score, int m, const Extremes& found) const {
    return mode == kSoftmax ? soft(score, found) : (m == found.chosen ? 1.0f : 0.0f) + (found.top - found.top);
  }
};

// Bytes of shared memory, from the start of each part. The second half of `hidden` is for FNNs with several hidden layers.
struct StackMemory {
  int input, hidden, hidden_bytes, outputs, slots, bytes;                    // forward
  int grads, routed, grad_x, x, weights, grad_weights;             // backward, in place of input and outputs
};

// This thread's place in row-wise work: features lane, lane + 16, ... of its row.
struct RowThread {
  int row, lane;
  int64_t at;   // the row in the batch
  bool inside;  // of the batch
  template <typename T>
  __device__ explicit RowThread(const Stack<T>& s)
      : row(static_cast<int>(threadIdx.x) / kThreadsOfRow), lane(static_cast<int>(threadIdx.x) % kThreadsOfRow) {
    at = static_cast<int64_t>(blockIdx.x) * kTileRows + row;
    inside = at < s.batch;
  }
};

template <typename T>
StackMemory stack_memory(const Stack<T>& stack, bool backward);
template <typename T>
bool stack_is_small(const Stack<T>& stack);  // enough, but for shared memory

}  // namespace fastmod::cuda
