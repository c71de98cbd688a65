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

// A number that stays in its register, where nvcc would reckon it anew wherever it is used.
__device__ inline int kept(int value) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+r"(value));
#endif
  return value;
}
__device__ inline int64_t kept(int64_t value) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+l"(value));
#endif
  return value;
}

// ---- activations: [chunk][high, low][row][16 features], so that a lane reads four neighbours of a row at once

constexpr int kChunkFloats = 2 * kTileRows * kDepthStep, kLow = kTileRows * kDepthStep;

__host__ __device__ inline int chunks_of(int features) {
  return static_cast<int>(static_cast<unsigned>(features + kDepthStep - 1) / kDepthStep);
}
__host__ __device__ inline int padded(int features) { return chunks_of(features) * kDepthStep; }

__device__ inline int place_of(int row, int feature) {
  const auto f = static_cast<unsigned>(feature);
  return static_cast<int>(f / kDepthStep * kChunkFloats + f % kDepthStep) + row * kDepthStep;
}

__device__ inline bool finite(float value) { return value - value == 0.0f; }

// high + low == value, and tensor cores read all of low but its last bit at most. What is not finite makes a sum that is
// not finite, which is then computed anew.
__device__ inline void split_special(float value, float* high, float* low) {
  *high = finite(value) ? __uint_as_float(__float_as_uint(value) & 0xffffe000u) : value;  // close to overflow, or inf
  *low = finite(value) ? value - *high : value;
}
struct alignas(8) Two32 {
  float v[2];
};
// Of kRows rows, 8 apart: two neighbours each, the first of them even, from `place` on.
template <int kRows>
__device__ inline void put_at(float* place, const float (&value)[kRows][2]) {
  uint2 high[kRows];  // words, as they need no conversion then
  Two32 low[kRows];
  float all = 0;
#pragma unroll
  for (int i = 0; i < 2 * kRows; ++i) {
    uint32_t& word = i % 2 ? high[i / 2].y : high[i / 2].x;
    word = tf32_bits(value[i / 2][i % 2]);
    low[i / 2].v[i % 2] = rest_of(value[i / 2][i % 2], word);
    all = i ? all + low[i / 2].v[i % 2] : low[0].v[0];
  }
  if (!finite(all)) {
#pragma unroll
    for (int i = 0; i < 2 * kRows; ++i) {  // the other row's bits are as they would be without this one
      float& rest = low[i / 2].v[i % 2];
      if (finite(rest)) continue;
      float special;
      split_special(value[i / 2][i % 2], &special, &rest);
      (i % 2 ? high[i / 2].y : high[i / 2].x) = __float_as_uint(special);
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    reinterpret_cast<uint2*>(place)[i * 4 * kDepthStep] = high[i];
    reinterpret_cast<Two32*>(place)[i * 4 * kDepthStep + kLow / 2] = low[i];
  }
}
__device__ inline void put(float* activations, int row, int feature, float first, float second) {
  const float value[1][2] = {{first, second}};
  put_at(activations + place_of(row, feature), value);
}
__device__ inline void put(float* activations, int row, int feature, float value) {
  float* at = activations + place_of(row, feature);
  at[0] = __uint_as_float(tf32_bits(value));
  at[kLow] = value - at[0];
  if (!finite(at[kLow])) split_special(value, at, at + kLow);
}
__device__ inline float get(const float* activations, int row, int feature) {
  const float* at = activations + place_of(row, feature);
  return at[0] + at[kLow];
}

// ---- what comes from outside

template <typename T>
__device__ inline float rounded(float value) {
  T low;
  narrow(value, &low);
  return widen(low);
}
// A parameter as a stack of T computes with it.
template <typename T, typename W>
__device__ inline Compute<T> read_as(W value) {
  if constexpr (sizeof(W) > sizeof(T)) {
    return rounded<T>(value);
  } else {
    return widen(value);
  }
}
template <typename T>
__device__ inline Compute<T> read_at(const Blocks<T>& blocks, int64_t i) {
  if constexpr (sizeof(T) < 4) {
    if (blocks.wide) return rounded<T>(static_cast<const float*>(blocks.first)[i]);
  }
  return widen(static_cast<const T*>(blocks.first)[i]);
}

// ---- copies: each has rows of blocks of its own, on grid.y

template <typename T, typename W>
__device__ inline int64_t copy_of(const Stack<T, W>& s) {
  return s.first_copy + blockIdx.y;
}
template <typename T, typename W>
__device__ inline W* weight_of(const Stack<T, W>& s, int linear) {
  const StackLinear<W>& own = s.linear[linear];
  return own.weight + (own.shared & kSharedWeight ? 0 : copy_of(s) * own.out * own.in);
}
template <typename T, typename W>
__device__ inline W* bias_of(const Stack<T, W>& s, int linear) {
  const StackLinear<W>& own = s.linear[linear];
  return own.bias + (own.shared & kSharedBias ? 0 : copy_of(s) * own.out);
}
template <typename T, typename W>
__device__ inline Blocks<T> input_of(const Stack<T, W>& s, int layer) {
  if (layer > 0) return {s.layer[layer - 1].out + copy_of(s) * s.batch * s.layer[layer - 1].n * s.d, false};
  const int64_t bytes = s.x.wide ? 4 : sizeof(T);
  return {static_cast<const unsigned char*>(s.x.first) + copy_of(s) * s.x_step * bytes, s.x.wide};
}
// The layer with this copy's places; m: blocks that it reads.
template <typename T, typename W>
__device__ inline StackLayer<T> layer_of(const Stack<T, W>& s, int index, int m) {
  StackLayer<T> own = s.layer[index];
  const int64_t copy = copy_of(s), row = copy * s.batch;
  const auto advance = [](auto*& pointer, int64_t step) {
    if (pointer) pointer += step;
  };
  advance(own.out, row * own.n * s.d);
  advance(own.logits, row * m * own.n);
  advance(own.gate, row * own.n);
  advance(own.saved, copy * own.rows * ((s.batch + kBatchTile - 1) / kBatchTile * kBatchTile));
  advance(own.grads, row * (own.rows - own.n * s.d));
  advance(own.tau, copy * own.tau_step);
  advance(own.seed, copy * own.seed_step);
  return own;
}

// Launches `launch(stack, copies)` for all of them: grid.y takes so many at a time.
constexpr int64_t kCopiesAtOnce = 65535;
template <typename T, typename W, typename Launch>
cudaError_t for_copies(Stack<T, W> stack, Launch launch) {
  cudaError_t error = cudaSuccess;
  for (; stack.first_copy < stack.copies && error == cudaSuccess; stack.first_copy += kCopiesAtOnce) {
    const int64_t left = stack.copies - stack.first_copy;
    error = launch(stack, static_cast<unsigned>(left < kCopiesAtOnce ? left : kCopiesAtOnce));
  }
  return error;
}

// ---- the order in which weights are used

// One linear layer as a warp meets it: `columns` results. Forward, the sums run over two parts of the weight's inputs,
// `depth[i]` of them from `first[i]` on, each in chunks of its own: update FNNs read [routed ; x], while x comes first in
// shared memory. Backward they run over the rows of the weight.
struct Step {
  int columns, depth[2], first[2];
  __device__ int chunks() const { return chunks_of(depth[0]) + chunks_of(depth[1]); }
  __device__ int products() const { return depth[0] + depth[1]; }
};

template <bool kBackward, typename T, typename W>
__device__ inline Step step_of(const Stack<T, W>& s, int linear, bool need_x) {
  const int in = s.linear[linear].in, out = s.linear[linear].out, routed = s.linear[linear].routed;
  if constexpr (kBackward) {
    const bool alone = linear == s.route && routed && !need_x;  // the gradient of x is not wanted
    return {alone ? routed : in, {out, 0}, {0, 0}};
  } else {
    return {out, {in - routed, routed}, {routed, 0}};
  }
}

// A part of the sums of a linear layer as the stream of its weights meets it.
template <typename W>
struct alignas(16) PartPlan {
  const W* weight;  // forward: the part's first input of output 0; backward: all
  int in, columns, depth;
  int plain;     // forward: chunks that are there throughout, four neighbours to be copied at once
  int careful;   // the other chunks
  int together;  // neighbours that can be copied at once
};
// What is known of a linear layer, reckoned once per block and kept in shared memory.
template <typename T, typename W>
struct alignas(16) LinearPlan {
  PartPlan<W> part[2];
  const W* bias;
  int chunks, products;
  // Forward only. Places are those of the block's first row.
  float* saved;  // null if nothing is kept
  T* logits;     // of the last linear layer of an FNN, for those outputs from `before` on
  int width, before;
  int from, to;  // activations, in bytes of shared memory
  int end;       // kRouteEnd, kUpdateEnd: the last of an FNN
  int pairs;     // two neighbours of bias and saved can be read and written at once
};
constexpr int kRouteEnd = 1, kUpdateEnd = 2;

template <bool kBackward, typename T, typename W>
__device__ inline void plan_linear(const Stack<T, W>& s, int linear, bool need_x, LinearPlan<T, W>* plan) {
  const Step step = step_of<kBackward>(s, linear, need_x);
  const W* weight = weight_of(s, linear);
  const int in = s.linear[linear].in;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int depth = step.depth[i], first = step.first[i];
    const auto by = [&](int count) {
      const bool even = kBackward ? in % count == 0 && step.columns % count == 0
                                  : in % count == 0 && first % count == 0 && depth % count == 0;
      return even && reinterpret_cast<uintptr_t>(weight) % (count * sizeof(W)) == 0;
    };
    const int together = !kBackward && by(4) ? 4 : by(2) ? 2 : 1;
    const int plain = together == 4 ? depth / kDepthStep : 0;
    plan->part[i] = {weight + first, in, step.columns, depth, plain, chunks_of(depth) - plain, together};
  }
  plan->bias = bias_of(s, linear);
  plan->chunks = step.chunks();
  plan->products = step.products();
}
// By loads of 16 bytes.
template <typename Plan>
__device__ inline Plan read_plan(const Plan* from) {
  union {
    uint4 words[sizeof(Plan) / 16];
    Plan plan;
  } found;
#pragma unroll
  for (size_t i = 0; i < sizeof(Plan) / 16; ++i) found.words[i] = reinterpret_cast<const uint4*>(from)[i];
  return found.plan;
}

template <typename T>
struct alignas(4 * sizeof(T)) Weights4 {
  T v[4];
};
template <typename T>
constexpr int kSlotBytes = kStages * 2 * kStackThreads * static_cast<int>(sizeof(Weights4<T>));

// Four weights of W from shared memory, kOffset bytes behind an address, and a copy of as many to it: one instruction
// each.
template <int kOffset, typename W>
__device__ inline Weights4<W> read_unit(SharedAddress address) {
#if defined(__CUDA_ARCH__)
  Weights4<W> found;
  if constexpr (sizeof(W) == 4) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4 + %5];"
                 : "=f"(found.v[0]), "=f"(found.v[1]), "=f"(found.v[2]), "=f"(found.v[3])
                 : "r"(address), "n"(kOffset)
                 : "memory");
  } else {
    uint2 words;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2 + %3];"
                 : "=r"(words.x), "=r"(words.y)
                 : "r"(address), "n"(kOffset)
                 : "memory");
    memcpy(&found, &words, sizeof(found));
  }
  return found;
#else
  return *reinterpret_cast<const Weights4<W>*>(address + kOffset);
#endif
}
template <int kOffset, typename W>
__device__ inline void copy_unit(SharedAddress address, const W* from, int size) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (sizeof(W) == 4) {
    asm volatile("cp.async.cg.shared.global [%0 + %3], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(size), "n"(kOffset)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0 + %3], [%1], 8, %2;" ::"r"(address), "l"(from), "r"(size), "n"(kOffset)
                 : "memory");
  }
#else
  copy_async_to<4 * static_cast<int>(sizeof(W))>(address + kOffset, from, size);
#endif
}

// Copies the units of weights that this lane will need. Unit: forward [two tiles][four inputs] of column g of each tile,
// backward [two k steps][two rows of the weight][two neighbouring columns].
template <typename T, typename W, bool kBackward>
struct WeightStream {
  static constexpr int kUnit = 4 * static_cast<int>(sizeof(W)), kHalf = kStackThreads * kUnit;  // bytes
  const LinearPlan<T, W>* plans;
  unsigned char* slots;         // this thread's, [stage][half], kHalf apart
  SharedAddress address, slot;  // the same; that whose unit comes next
  int lane, first_column;  // of this thread, of its warp
  int g, t4;               // lane / 4, 4 * (lane % 4)
  int linear, end, column, columns, in;
  int part, chunks;  // of the sums; chunks of it that are left, forward after the `plain` ones
  int left[2];       // forward: inputs left from this lane's first on, of each tile; backward: rows of the weight, columns
  const W *from, *second;  // forward: of each tile
  int together;            // neighbours that can be copied at once
  int plain, size[2];      // forward: chunks that are there throughout, and what to copy of them for each tile

  __device__ WeightStream(const LinearPlan<T, W>* plans_, void* memory, int first, int end_)
      : plans(plans_), slots(static_cast<unsigned char*>(memory) + threadIdx.x * sizeof(Weights4<W>)),
        address(shared_address(slots)), slot(address), lane(kept(static_cast<int>(threadIdx.x) % kWarp)),
        first_column(kept(static_cast<int>(threadIdx.x) / kWarp * kPairColumns)), g(kept(lane / 4)),
        t4(kept(4 * (lane % 4))), linear(first), end(end_),
        from(plans[0].part[0].weight), second(from) {
    enter();
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) next();
  }

  // The first linear layer from here on in which this warp has columns.
  __device__ void enter() {
    column = first_column;
    for (; linear != end; linear += kBackward ? -1 : 1) {
      if (column < plans[linear].part[0].columns) return begin(0);
    }
    left[0] = left[1] = 0;  // units of nothing, for ever
    chunks = -1;
    plain = 0;
    together = 1;  // any address will do
  }
  __device__ void begin(int part_) {
    const PartPlan<W> own = read_plan(plans[linear].part + part_);
    part = part_;
    in = own.in;
    columns = own.columns;
    chunks = own.careful;
    together = own.together;
    if constexpr (kBackward) {
      left[0] = own.depth - t4;
      left[1] = columns - column - 2 * g;
      from = own.weight + static_cast<int64_t>(t4) * in + column + 2 * g;
    } else {
      plain = own.plain;
      left[0] = column + g < columns ? own.depth - t4 : 0;
      left[1] = column + 8 + g < columns ? own.depth - t4 : 0;
      from = own.weight + static_cast<int64_t>(column + g) * in + t4;
      second = from + static_cast<int64_t>(8) * in;
      size[0] = left[0] > 0 ? kUnit : 0;
      size[1] = left[1] > 0 ? kUnit : 0;
      left[0] -= plain * kDepthStep;
      left[1] -= plain * kDepthStep;
    }
  }
  __device__ void end_of_part() {
    if (part == 0 && plans[linear].part[1].depth > 0) return begin(1);
    column += kStackWarps * kPairColumns;
    if (column < columns) return begin(0);
    linear += kBackward ? -1 : 1;
    enter();
  }

  // To number `at` of the unit, kHalf bytes further on from number 4 on. Nothing is read unless `inside`.
  template <int kCount>
  __device__ void copy(int at, const W* source, bool inside) const {
    const int offset = at / 4 * kHalf + at % 4 * static_cast<int>(sizeof(W));
    if constexpr (kCount * sizeof(W) >= 4) {
      constexpr int kBytes = kCount * static_cast<int>(sizeof(W));
      copy_async_to<kBytes>(slot + offset, source, inside ? kBytes : 0);
    } else {
      W* to = reinterpret_cast<W*>(slots + (slot - address) + offset);
      narrow(0.0f, to);
      if (inside) *to = *source;
    }
  }

  __device__ void next_plain() {
    copy_unit<0>(slot, from, size[0]);
    copy_unit<kHalf>(slot, second, size[1]);
    from += kDepthStep;
    second += kDepthStep;
    --plain;
  }
  // At the end of a part, and where neighbours cannot be copied at once.
  __device__ void next_careful() {
    if (chunks == 0) end_of_part();
    if (plain > 0) return next_plain();
    if (together == 4) {
      copy<4>(0, from, left[0] > 0);
      copy<4>(4, second, left[1] > 0);
    } else if (together == 2) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        copy<2>(i, from + i, i < left[0]);
        copy<2>(4 + i, second + i, i < left[1]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        copy<1>(i, from + i, i < left[0]);
        copy<1>(4 + i, second + i, i < left[1]);
      }
    }
    from += kDepthStep;
    second += kDepthStep;
    left[0] -= kDepthStep;
    left[1] -= kDepthStep;
    if (chunks > 0) --chunks;
  }
  __device__ void next_backward() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const W* source = from + static_cast<int64_t>(i) * in;
      if (together == 2) {
        copy<2>(2 * i, source, i < left[0] && left[1] > 0);
      } else {
        copy<1>(2 * i, source, i < left[0] && left[1] > 0);
        copy<1>(2 * i + 1, source + 1, i < left[0] && left[1] > 1);
      }
    }
    from += static_cast<int64_t>(kDepthStep) * in;
    left[0] -= kDepthStep;
    if (--chunks == 0) end_of_part();
  }

  // Starts the copy of the next unit, into the slot whose unit was read last.
  __device__ void next() {
    if constexpr (kBackward) {
      next_backward();
    } else if (plain > 0) {
      next_plain();
    } else {
      next_careful();
    }
    commit_copies();
    slot = slot == address + (kStages - 1) * 2 * kHalf ? address : slot + 2 * kHalf;
  }

  // The oldest unit, whose place the next one takes.
  __device__ void take(float (&w)[2][4]) {
    wait_copies<kStages - 1>();
    const Weights4<W> four[2] = {read_unit<0, W>(slot), read_unit<kHalf, W>(slot)};
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i / 4][i % 4] = read_as<T>(four[i / 4].v[i % 4]);
    next();
  }
};

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

// ---- routing of one column, (row, n), over m

template <typename C = float>
struct RoutingColumn {
  struct Extremes {
    C top, sum;
    int chosen;
  };
  int mode;
  C tau;
  int64_t seed;

  __device__ explicit RoutingColumn(const Routing<C>& routing) : mode(routing.mode) {
    tau = routing.tau ? *routing.tau : routing.tau_value;
    if (!(tau > C(0))) tau = C(NAN);
    seed = routing.seed ? *routing.seed : routing.seed_value;
  }
  template <typename T>
  __device__ RoutingColumn(int mode_, const StackLayer<T>& layer) : mode(mode_) {
    tau = layer.tau ? *layer.tau : layer.tau_value;
    if (!(tau > 0.0f)) tau = NAN;  // as in multiplex.cuh
    seed = layer.seed ? *layer.seed : 0;
  }
  // Logits -> scores, in place; stride: from one m to the next, in memory and in the noise, which begins at `index`.
  __device__ Extremes scores(C* column, int count, int stride, int64_t index) const {
    Extremes found{-C(INFINITY), C(0), 0};
#pragma unroll 1
    for (int m = 0; m < count; ++m, column += stride, index += stride) {
      C value = *column;
      if (mode == kGumbel) value += gumbel_at<C>(seed, index);
      value /= tau;
      *column = value;
      if (value > found.top || value != value) {  // a NaN stays the maximum, as in torch
        found.top = value;
        found.chosen = m;
      }
    }
    return found;
  }
  __device__ void add_up(const C* column, int count, int stride, Extremes& found) const {
    for (int m = 0; m < count; ++m) found.sum += exponential(column[m * stride] - found.top);
  }
  // The softmax of few logits, which stay in registers, in place.
  static constexpr int kFew = 8;
  __device__ void weigh_few(C* column, int count, int stride) const {
    C value[kFew], top = -C(INFINITY), sum = 0;
#pragma unroll
    for (int m = 0; m < kFew; ++m) {
      value[m] = -C(INFINITY);
      if (m < count) value[m] = column[m * stride] / tau;
      top = value[m] > top ? value[m] : top;  // a NaN makes the sum one
    }
#pragma unroll
    for (int m = 0; m < kFew; ++m) {
      value[m] = exp_below(value[m] - top);
      sum += value[m];
    }
#pragma unroll
    for (int m = 0; m < kFew; ++m) {
      if (m < count) column[m * stride] = value[m] / sum;
    }
  }
  // Logits -> weights of the forward, in place.
  __device__ void weigh(C* column, int count, int stride, int64_t index) const {
    if (mode == kSoftmax && count <= kFew) return weigh_few(column, count, stride);
    Extremes found = scores(column, count, stride, index);
    const C *end = column + count * stride, *chosen = column + found.chosen * stride;
    if (mode == kSoftmax) {
#pragma unroll 1
      for (C* at = column; at != end; at += stride) {
        *at = exponential(*at - found.top);
        found.sum += *at;
      }
    }
#pragma unroll 1
    for (C* at = column; at != end; at += stride) {
      *at = mode == kSoftmax ? *at / found.sum : hard(at == chosen, found);
    }
  }
  // One-hot, or NaN throughout where the softmax would be: top - top is NaN for a NaN or an infinity.
  __device__ C hard(bool chosen, const Extremes& found) const { return (chosen ? C(1) : C(0)) + (found.top - found.top); }
  __device__ C soft(C score, const Extremes& found) const { return exponential(score - found.top) / found.sum; }
  __device__ C forward_weight(C score, int m, const Extremes& found) const {
    return mode == kSoftmax ? soft(score, found) : hard(m == found.chosen, found);
  }
};

// Bytes of shared memory, from the start of each part. The second half of `hidden` is for FNNs with several hidden layers.
struct StackMemory {
  int plans, layers, input, hidden, hidden_bytes, outputs, values, row_values, routed_values, slots, bytes;  // forward
  int grads, routed, grad_x, x, weights, grad_weights;             // backward, in place of input and outputs
};

// This thread's place in row-wise work: features lane, lane + 16, ... of its row.
struct RowThread {
  int row, lane;
  int64_t at;   // the row in the batch
  bool inside;  // of the batch
  template <typename T, typename W>
  __device__ explicit RowThread(const Stack<T, W>& s)
      : row(kept(static_cast<int>(threadIdx.x) / kThreadsOfRow)),
        lane(kept(static_cast<int>(threadIdx.x) % kThreadsOfRow)) {
    at = kept(static_cast<int64_t>(blockIdx.x) * kTileRows + row);
    inside = at < s.batch;
  }
};

template <typename T, typename W>
StackMemory stack_memory(const Stack<T, W>& stack, bool backward);
template <typename T, typename W>
bool stack_is_small(const Stack<T, W>& stack);  // enough, but for shared memory

// FASTMOD_INSTANTIATE(T, W) for all that there are.
#define FASTMOD_INSTANTIATE_STACKS             \
  FASTMOD_INSTANTIATE(float, float)            \
  FASTMOD_INSTANTIATE(__half, __half)          \
  FASTMOD_INSTANTIATE(__nv_bfloat16, __nv_bfloat16) \
  FASTMOD_INSTANTIATE(__half, float)           \
  FASTMOD_INSTANTIATE(__nv_bfloat16, float)

}  // namespace fastmod::cuda
