// Plans of the linear layers of a stack, made before it starts: places, sizes, order of the weights. See smfr.cuh.
#pragma once

#include "smfr_activations.cuh"

namespace fastmod::cuda {

// ---- copies: each has its own blocks on grid.y

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
// The layer with its pointers moved to this copy; m: blocks that it reads.
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
  if (own.tau) own.tau = number_after(own.tau, own.tau_type, copy * own.tau_step);
  advance(own.seed, copy * own.seed_step);
  return own;
}

// Calls launch(stack, copies) for all copies.
template <typename T, typename W, typename Launch>
cudaError_t for_copies(Stack<T, W> stack, Launch launch) {
  return by_copies(stack.copies, [&](int64_t first, unsigned count) {
    stack.first_copy = first;
    return launch(stack, count);
  });
}

// ---- the order in which weights are used

// One linear layer from the view of a warp: `columns` results. Forward, the sums run over two parts of the weight's
// inputs, `depth[i]` of them from `first[i]` on, each in its own chunks: update FNNs read [routed ; x], but x comes
// first in shared memory. Backward they run over the rows of the weight.
struct Step {
  int columns, depth[2], first[2];
  __device__ int chunks() const { return chunks_of(depth[0]) + chunks_of(depth[1]); }
  __device__ int terms() const { return depth[0] + depth[1]; }
};

template <bool kBackward, typename T, typename W>
__device__ inline Step step_of(const Stack<T, W>& s, int linear, bool need_x) {
  const int in = s.linear[linear].in, out = s.linear[linear].out, routed = s.linear[linear].routed;
  if constexpr (kBackward) {
    const bool alone = linear == s.route && routed && !need_x;  // the gradient of x is not wanted
    return {alone ? routed : in, {out, 0}, {0, 0}};
  } else {
    if (in == routed) return {out, {in, 0}, {0, 0}};
    return {out, {in - routed, routed}, {routed, 0}};
  }
}

// Errors do not average out in sums of so few terms. These get three more products: of the low parts, and of the last
// bit of each factor, which tensor cores ignore.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kFewTerms = 0;  // factors are exact there, see mma_by_shuffles
#else
constexpr int kFewTerms = 32;
#endif
// How many products of high and low parts each product of a sum takes: 16-bit weights have no low part.
template <typename T>
__device__ inline int products_of(int terms, bool precise) {
  return sizeof(T) < 4 ? 2 : !precise ? 1 : terms <= kFewTerms ? 6 : 3;
}

// A part of the sums of a linear layer, for the stream of its weights.
template <typename W>
struct alignas(16) PartPlan {
  const W* weight;  // forward: the part's first input of output 0; backward: all
  int stride;  // bytes from one output to the next
  int columns, depth;
  int plain;     // forward: units of two chunks before the last, if four neighbours can be copied at once
  int more;      // parts that follow
  int together;  // neighbours that can be copied at once
};
// The plan of a linear layer, computed once per block and kept in shared memory.
template <typename T, typename W>
struct alignas(16) LinearPlan {
  PartPlan<W> part[2];
  const W* bias;
  int terms;     // per sum
  int products;  // of tensor cores per term, see multiply
  short units[2], half[2];  // per part of the sums: units of two chunks, and of one chunk at its end
  float share;           // what truncation takes from the first unit, to compensate for
  // Forward only. Pointers and places are those of the block's first row.
  float* saved;  // null if nothing is kept
  T* logits;     // in the last linear layer of an FNN, for the outputs from `before` on
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
    PartPlan<W>& part = plan->part[i];
    part.weight = weight + first;
    part.stride = in * static_cast<int>(sizeof(W));
    part.columns = step.columns;
    part.depth = depth;
    part.plain = together == 4 && depth > 0 ? (depth - 1) / (kUnitChunks * kDepthStep) : 0;
    part.more = i == 0 && step.depth[1] > 0;
    part.together = together;
    plan->units[i] = chunks_of(depth) / kUnitChunks;
    plan->half[i] = chunks_of(depth) % kUnitChunks;
  }
  plan->bias = bias_of(s, linear);
  plan->terms = step.terms();
  plan->products = products_of<T>(plan->terms, s.precise);
  plan->share = plan->terms <= kExactDepth ? 0.0f : kCutOff * (2 * step.chunks() - 1);
}
// Read by loads of 16 bytes.
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

}  // namespace fastmod::cuda
