// SMFR forward in one launch: a block takes kTileRows rows through all layers of the stack. See smfr.cuh.
#include "smfr.cuh"

namespace fastmod::cuda {
namespace {

template <int kMany>
struct alignas(4 * kMany) Some {
  float v[kMany];
};

// Four outputs of the routed blocks at a time, so that each value of x is read once for them.
__device__ inline void mix_row(int lane, int m_count, int n_count, int d_count, const float* weights,
                               const float* values, float* routed) {
  const int groups = (n_count + 3) / 4;
  for (int task = lane; task < groups * d_count; task += kThreadsOfRow) {
    const int group = task / d_count, d = task - group * d_count, there = n_count - 4 * group;
    const float *own = weights + 4 * group, *x = values + d;
    float total[4] = {};
    for (int m = 0; m < m_count; ++m, own += n_count, x += d_count) {
#pragma unroll
      for (int i = 0; i < 4; ++i) total[i] += (i < there ? own[i] : 0.0f) * *x;
    }
    float* to = routed + 4 * group * d_count + d;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < there) to[i * d_count] = total[i];
    }
  }
}

// The same for even d: two numbers of each of kMany outputs, which is four if n is a multiple of four, else one.
// Calls emit(feature, first, second) for the routed blocks.
template <int kMany, typename Emit>
__device__ inline void mix_row_by_pairs(int lane, int m_count, int n_count, int d_count, const float* weights,
                                        const float* values, Emit emit) {
  const auto pairs = static_cast<unsigned>(d_count) / 2, tasks = static_cast<unsigned>(n_count) / kMany * pairs;
  for (auto task = static_cast<unsigned>(lane); task < tasks; task += kThreadsOfRow) {
    const unsigned group = task / pairs, pair = task - group * pairs;
    const auto* own = reinterpret_cast<const Some<kMany>*>(weights) + group;
    const auto* x = reinterpret_cast<const Two32*>(values) + pair;
    float total[kMany][2] = {};
#pragma unroll 4
    for (int m = 0; m < m_count; ++m, own += n_count / kMany, x += pairs) {
      const Some<kMany> w = *own;
      const Two32 both = *x;
#pragma unroll
      for (int i = 0; i < 2 * kMany; ++i) total[i / 2][i % 2] += w.v[i / 2] * both.v[i % 2];
    }
    const int feature = static_cast<int>(kMany * group * d_count + 2 * pair);
#pragma unroll
    for (int i = 0; i < kMany; ++i) emit(feature + i * d_count, total[i][0], total[i][1]);
  }
}

// Stores two numbers, at once if they are aligned for it.
__device__ inline void store_pair(float* to, const float (&value)[2], bool at_once, const bool (&there)[2]) {
  if (at_once) {
    if (there[0]) *reinterpret_cast<Two32*>(to) = Two32{{value[0], value[1]}};
    return;
  }
  if (there[0]) to[0] = value[0];
  if (there[1]) to[1] = value[1];
}
__device__ inline bool for_pairs(const float* section, int width) {
  return width % 2 == 0 && reinterpret_cast<uintptr_t>(section) % 8 == 0;
}

// The plan of a linear layer, with the destinations of its results, from the block's first row on.
template <typename T, typename W>
__device__ inline void plan_forward(const Stack<T, W>& s, const StackMemory& memory, int linear,
                                    LinearPlan<T, W>* plan) {
  plan_linear<false>(s, linear, true, plan);
  const int per_layer = s.route + s.update, l = linear / per_layer, place = linear - l * per_layer;
  const int m = l ? s.layer[l - 1].n : s.m, width = s.linear[linear].out;
  const StackLayer<T> layer = layer_of(s, l, m);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kTileRows;
  const bool update = place >= s.route, last = place + 1 == s.route || place + 1 == per_layer;
  int64_t columns = update ? layer.n * s.d : 0;  // width of all sections before this one
  for (int i = 0; i < place; ++i) columns += s.linear[l * per_layer + i].out;
  const int own = update ? place - s.route : place;  // index in its FNN; hidden layers alternate between two places
  const int context = update && !s.context ? place_of(0, padded(m * s.d)) * 4 : 0;
  plan->from = own ? memory.hidden + (own - 1) % 2 * memory.hidden_bytes : memory.input + context;
  plan->to = memory.hidden + own % 2 * memory.hidden_bytes;
  plan->end = !last ? 0 : update ? kUpdateEnd : kRouteEnd;
  plan->width = width;
  plan->before = last && update ? layer.n * s.d : 0;
  plan->saved = layer.saved ? layer.saved + s.batch * columns + row * width : nullptr;
  plan->logits = (update ? layer.gate : layer.logits) + (last ? row * (width - plan->before) : 0);
  plan->pairs = row + kTileRows <= s.batch && for_pairs(plan->saved, width) &&
                reinterpret_cast<uintptr_t>(plan->bias) % (2 * sizeof(W)) == 0;
}
// A layer with its pointers moved to the block's first row; `saved` is the section of the routed blocks.
template <typename T, typename W>
__device__ inline void plan_layer(const Stack<T, W>& s, int l, StackLayer<T>* plan) {
  StackLayer<T> layer = layer_of(s, l, l ? s.layer[l - 1].n : s.m);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kTileRows, values = layer.n * s.d;
  int64_t columns = 0;
  for (int i = 0; i < s.route; ++i) columns += s.linear[l * (s.route + s.update) + i].out;
  layer.out += row * values;
  if (layer.saved) layer.saved += s.batch * columns + row * values;
  *plan = layer;
}

template <typename W>
struct alignas(2 * sizeof(W)) Pair {
  W v[2];
};

// Takes the results of one linear layer from linear_layer.
template <typename T, typename W>
struct Epilogue {
  const LinearPlan<T, W>& plan;
  const int row;           // of the first value
  const int (&inside)[2];  // whether that row and the one 8 below are in the batch
  float* const all_outputs;  // [row][width]
  const float threshold;
  float& excesses;

  static constexpr int kApart = pairs_apart<false>;

  __device__ void operator()(int first, float (&value)[2][2][2], float* at) const {
    const int width = plan.width;
    if (!plan.pairs) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) carefully(first + kApart * pair, value[pair], at + kApart * pair);
      return;
    }
    const bool there[2] = {first < width, first + kApart < width};
    const auto* offset = reinterpret_cast<const Pair<W>*>(plan.bias + first);
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      if (!there[pair]) continue;  // zeros
      const Pair<W> both = offset[kApart / 2 * pair];
      add(value[pair], read_as<T>(both.v[0]), read_as<T>(both.v[1]));
    }
    const int from = row * width + first;
    if (plan.end == 0) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) activate(value[pair], at + kApart * pair);
    } else {
      auto* output = reinterpret_cast<Two32*>(all_outputs + from);
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        if (!there[pair]) continue;
        store(output + kApart / 2 * pair, width, value[pair]);
        show(first + kApart * pair - plan.before, value[pair]);
      }
    }
    if (!plan.saved) return;
    auto* saved = reinterpret_cast<Two32*>(plan.saved + from);
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      if (there[pair]) store(saved + kApart / 2 * pair, width, value[pair]);
    }
  }

  // Two neighbours of each of two rows.
  __device__ static void store(Two32* to, int width, const float (&value)[2][2]) {
    to[0] = {{value[0][0], value[0][1]}};
    to[4 * width] = {{value[1][0], value[1][1]}};
  }
  __device__ static void add(float (&value)[2][2], float first, float second) {
#pragma unroll
    for (int j = 0; j < 4; ++j) value[j / 2][j % 2] += j % 2 ? second : first;
  }
  __device__ static void activate(float (&value)[2][2], float* at) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float& own = value[j / 2][j % 2];
      own = fmaxf(own, own * static_cast<float>(kLeakySlope));
    }
    put_at(at, value);
  }
  // Writes two logits of each row; the first may not be a logit.
  __device__ void show(int f, const float (&value)[2][2]) const {
    if (f < 0) {
      if (f + 1 == 0) {
        show_one(0, value[0][1], 0);
        show_one(0, value[1][1], 1);
      }
      return;
    }
    const int shown = plan.width - plan.before;
    T* const to = plan.logits + (row * shown + f);
#pragma unroll
    for (int j = 0; j < 4; ++j) narrow(value[j / 2][j % 2], to + (j / 2 * 8 * shown + j % 2));
    if (threshold < 0.0f) return;
    const bool none = (fabsf(value[0][0]) <= threshold) & (fabsf(value[0][1]) <= threshold) &
                      (fabsf(value[1][0]) <= threshold) & (fabsf(value[1][1]) <= threshold);
    if (none) return;
#pragma unroll
    for (int j = 0; j < 4; ++j) add_excess(value[j / 2][j % 2]);
  }
  __device__ void show_one(int f, float value, int half) const {
    narrow(value, plan.logits + ((row + half * 8) * (plan.width - plan.before) + f));
    if (threshold >= 0.0f) add_excess(value);
  }
  __device__ void add_excess(float value) const {
    const float over = excess(value, threshold);
    excesses += over * over;
  }

  // The slow path: rows that do not exist, columns that are not pairs.
  __device__ void carefully(int column, float (&value)[2][2], float* at) const {
    const int width = plan.width, from = row * width + column;
    const bool there[2] = {column < width, column + 1 < width}, last = plan.end != 0;
    add(value, there[0] ? read_as<T>(plan.bias[column]) : 0.0f, there[1] ? read_as<T>(plan.bias[column + 1]) : 0.0f);
    if (!last) activate(value, at);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int half = j / 2, f = column + j % 2, place = from + half * 8 * width + j % 2;
      if (!there[j % 2]) continue;
      if (last) all_outputs[place] = value[half][j % 2];
      if (!inside[half]) continue;
      if (last && f >= plan.before) show_one(f - plan.before, value[half][j % 2], half);
      if (plan.saved) plan.saved[place] = value[half][j % 2];
    }
  }
};

// The row of a thread: a second copy of x and of routed, each contiguous, besides those in `input`, which are
// activations in chunks.
template <typename T>
struct RowForward {
  const RowThread& r;
  const int d;
  float *input, *x, *routed;

  // From logits, in `own`, to routed blocks.
  __device__ void route(int mode, const StackLayer<T>& layer, int m_count, float* own) const {
    const int n_count = layer.n, first = padded(m_count * d), values = n_count * d, width = m_count * n_count;
    const RoutingColumn column(mode, layer);
    for (int n = r.lane; n < n_count; n += kThreadsOfRow) {
      column.weigh(own + n, m_count, n_count, r.at * width + n);
    }
    __syncwarp(kAllLanes);
    float* saved = layer.saved && r.inside ? layer.saved + r.row * values : nullptr;
    if (d % 2 == 0) {
      const bool together = for_pairs(layer.saved, values);
      const auto emit = [&](int f, float value, float next) {
        put(input, r.row, first + f, value, next);
        *reinterpret_cast<Two32*>(routed + f) = Two32{{value, next}};
        if (saved) store_pair(saved + f, {value, next}, together, {true, true});
      };
      if (n_count % 4 == 0) {
        mix_row_by_pairs<4>(r.lane, m_count, n_count, d, own, x, emit);
      } else {
        mix_row_by_pairs<1>(r.lane, m_count, n_count, d, own, x, emit);
      }
      clear(first + values, first + padded(values));
    } else {
      mix_row(r.lane, m_count, n_count, d, own, x, routed);
      __syncwarp(kAllLanes);
      for (int f = r.lane; f < padded(values); f += kThreadsOfRow) {
        const float value = f < values ? routed[f] : 0.0f;
        put(input, r.row, first + f, value);
        if (saved && f < values) saved[f] = value;
      }
    }
  }
  // From new values and gate logits, in `own`, to the blocks that the next layer reads.
  __device__ void gate(const StackLayer<T>& layer, const float* own) const {
    const int values = layer.n * d;
    T* const out = layer.out + r.row * values;
    const bool pairs = d % 2 == 0 && reinterpret_cast<uintptr_t>(layer.out) % (2 * sizeof(T)) == 0;
    for (int n = r.lane; n < layer.n; n += kThreadsOfRow) {
      const float logit = own[values + n], open = sigmoid(logit), closed = sigmoid(-logit);
      const auto mixed = [&](float fresh, float old, T* rounded) {
        narrow(open * fresh + closed * old, rounded);
        return widen(*rounded);
      };
      if (pairs) {
#pragma unroll 1
        for (int f = n * d; f < (n + 1) * d; f += 2) {
          Pair<T> both;
          const Two32 old = *reinterpret_cast<const Two32*>(routed + f);
          const float value[2] = {mixed(own[f], old.v[0], &both.v[0]), mixed(own[f + 1], old.v[1], &both.v[1])};
          *reinterpret_cast<Two32*>(x + f) = Two32{{value[0], value[1]}};
          if (r.inside) *reinterpret_cast<Pair<T>*>(out + f) = both;
          put(input, r.row, f, value[0], value[1]);
        }
      } else {
#pragma unroll 1
        for (int f = n * d; f < (n + 1) * d; ++f) {
          T rounded;
          const float value = mixed(own[f], routed[f], &rounded);
          x[f] = value;
          if (r.inside) out[f] = rounded;
          put(input, r.row, f, value);
        }
      }
    }
    clear(values, padded(values));
  }
  __device__ void clear(int from, int until) const {
    for (int f = from + r.lane; f < until; f += kThreadsOfRow) put(input, r.row, f, 0.0f);
  }
};

template <typename T, typename W>
__global__ void __launch_bounds__(kStackThreads, 1)
    stack_forward_kernel(const __grid_constant__ Stack<T, W> s, const __grid_constant__ StackMemory memory,
                         float* penalty, float* partials, unsigned* ticket) {
  FASTMOD_DYNAMIC_SHARED(shared);
  const auto part = [&](int offset) { return reinterpret_cast<float*>(shared + offset); };
  const int linears = s.depth * (s.route + s.update);
  auto* const plans = reinterpret_cast<LinearPlan<T, W>*>(shared + memory.plans);
  auto* layer = reinterpret_cast<StackLayer<T>*>(shared + memory.layers);
  for (int i = threadIdx.x; i < linears; i += kStackThreads) plan_forward(s, memory, i, plans + i);
  const int from_end = kStackThreads - 1 - static_cast<int>(threadIdx.x);
  if (from_end < s.depth) plan_layer(s, from_end, layer + from_end);
  __syncthreads();
  WeightStream<T, W, false> stream(plans, shared + memory.slots, 0, linears);
  const int until = kept(memory.plans + linears * static_cast<int>(sizeof(LinearPlan<T, W>)));

  const RowThread r(s);
  float* const values = part(memory.values) + r.row * memory.row_values;
  const RowForward<T> rows{r, s.d, part(memory.input), values, values + memory.routed_values};
  float* const outputs = part(memory.outputs);  // [row][output] of an FNN
  int m = s.m;
  for (int f = r.lane; f < padded(m * s.d); f += kThreadsOfRow) {
    const float value = r.inside && f < m * s.d ? read_at(input_of(s, 0), r.at * m * s.d + f) : 0.0f;
    put(rows.input, r.row, f, value);
    if (f < m * s.d) rows.x[f] = value;
  }
  const int64_t tile_row = static_cast<int64_t>(blockIdx.x) * kTileRows + stream.g;
  const int inside[2] = {kept(static_cast<int>(tile_row < s.batch)), kept(static_cast<int>(tile_row + 8 < s.batch))};
  float excesses = 0;
#pragma unroll 1
  for (int at = kept(memory.plans); at != until; at += static_cast<int>(sizeof(LinearPlan<T, W>))) {
    const auto& plan = *reinterpret_cast<const LinearPlan<T, W>*>(shared + at);
    __syncthreads();  // what this layer reads is written, and what it overwrites has been read
    const int width = plan.width, end = plan.end;
    if (stream.first_column < width) {
      const Epilogue<T, W> emit{plan, stream.g, inside, outputs, s.threshold, excesses};
      linear_layer(stream, plan, part(plan.from), part(plan.to), emit);
    }
    if (end == 0) continue;
    __syncthreads();
    if (end == kRouteEnd) {
      rows.route(s.mode, *layer, m, outputs + r.row * width);
    } else {
      rows.gate(*layer, outputs + r.row * width);
      m = layer->n;
      ++layer;
    }
  }

  __syncthreads();
  const float total = block_sum(excesses);
  const int64_t copy = copy_of(s);
  partials += copy * gridDim.x;
  if (threadIdx.x == 0) partials[blockIdx.x] = total;
  if (!last_to_arrive(ticket + copy, gridDim.x)) return;
  float sum = 0;
  for (int i = threadIdx.x; i < static_cast<int>(gridDim.x); i += kStackThreads) sum += fresh(partials + i);
  __syncthreads();
  sum = block_sum(sum);
  if (threadIdx.x == 0) penalty[copy] = sum;
}

}  // namespace

template <typename T, typename W>
StackMemory stack_memory(const Stack<T, W>& s, bool backward) {
  int features = 0, hidden = 0, outputs = 0, values = 0, blocks = s.m * s.d, logits = 0, m = s.m;
  const int per_layer = s.route + s.update;
  for (int l = 0; l < s.depth; ++l) {
    const auto larger = [](int a, int b) { return a > b ? a : b; };
    const int n = s.layer[l].n, own = n * s.d, x = m * s.d;
    features = larger(features, chunks_of(x) + chunks_of(own));
    values = larger(values, own);
    blocks = larger(blocks, larger(x, own));
    logits = larger(logits, m * n);
    outputs = larger(outputs, larger(m * n, own + n));
    for (int i = 0; i < per_layer; ++i) {
      if (i + 1 != s.route && i + 1 != per_layer) hidden = larger(hidden, chunks_of(s.linear[l * per_layer + i].out));
    }
    m = n;
  }
  StackMemory memory{};
  const auto take = [&](int floats) {
    const int at = memory.bytes;
    memory.bytes += (floats * 4 + 15) / 16 * 16;
    return at;
  };
  memory.hidden_bytes = hidden * kChunkFloats * 4;
  memory.hidden = take(hidden * kChunkFloats * (s.route > 2 || s.update > 2 ? 2 : 1));
  memory.slots = take(kSlotBytes<W> / 4);
  memory.plans = take(s.depth * per_layer * static_cast<int>(sizeof(LinearPlan<T, W>)) / 4);
  if (!backward) {
    memory.input = take(features * kChunkFloats);
    memory.outputs = take(outputs * kTileRows);
    memory.layers = take(s.depth * static_cast<int>(sizeof(StackLayer<T>)) / 4);
    memory.routed_values = (blocks + 1) / 2 * 2;  // pairs are aligned
    memory.row_values = memory.routed_values + (values + 1) / 2 * 2;
    memory.values = take(memory.row_values * kTileRows);
    return memory;
  }
  memory.grads = take(chunks_of(outputs) * kChunkFloats);
  memory.routed = take(values * kTileRows);
  memory.grad_x = take(blocks * kTileRows);
  memory.x = take(blocks * kTileRows);
  memory.weights = take(logits * kTileRows);
  memory.grad_weights = take(logits * kTileRows);
  return memory;
}

template <typename T, typename W>
bool stack_is_small(const Stack<T, W>& s) {
  const int linears = s.depth * (s.route + s.update);
  if (s.depth < 1 || s.depth > kStackLayers || s.route < 1 || s.update < 1 || linears > kStackLinears) return false;
  for (int i = 0; i < linears; ++i) {
    const int place = i % (s.route + s.update);
    const bool last = place + 1 == s.route || place + 1 == s.route + s.update;
    if (!last && s.linear[i].out > kMaxHidden) return false;
  }
  return true;
}

template <typename T, typename W>
bool stack_fits(const Stack<T, W>& s) {
  if (!stack_is_small(s)) return false;
  const int limit = shared_limit() - 1024;
  return stack_memory(s, false).bytes <= limit && stack_memory(s, true).bytes <= limit;
}

template <typename T, typename W>
cudaError_t smfr_forward(const Stack<T, W>& stack, float* penalty, float* partials, unsigned* ticket,
                         cudaStream_t stream) {
  if (!stack_is_small(stack)) return cudaErrorInvalidValue;
  if (stack.batch == 0) return cudaSuccess;
  const StackMemory memory = stack_memory(stack, false);
  const unsigned tiles = blocks_for(stack.batch, kTileRows).x;
  return for_copies(stack, [&](const Stack<T, W>& some, unsigned copies) {
    const auto kernel = stack_forward_kernel<T, W>;
    return FASTMOD_LAUNCH_LARGE(kernel, dim3(tiles, copies), kStackThreads, memory.bytes, stream, some,
                                memory, penalty, partials, ticket);
  });
}

#define FASTMOD_INSTANTIATE(T, W)                                  \
  template StackMemory stack_memory(const Stack<T, W>&, bool);     \
  template bool stack_fits(const Stack<T, W>&);                    \
  template bool stack_is_small(const Stack<T, W>&);                \
  template cudaError_t smfr_forward(const Stack<T, W>&, float*, float*, unsigned*, cudaStream_t);
FASTMOD_INSTANTIATE_STACKS

}  // namespace fastmod::cuda
