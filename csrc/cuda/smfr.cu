// SMFR forward in one launch: a block takes kTileRows rows through all layers of the stack. See smfr.cuh.
#include "smfr.cuh"

namespace fastmod::cuda {
namespace {

// Four outputs of the routed blocks at a time, so that each value of x is read once for them. values: [x ; routed].
__device__ inline void mix_row(int lane, int m_count, int n_count, int d_count, const float* weights, float* values) {
  const int groups = (n_count + 3) / 4;
  for (int task = lane; task < groups * d_count; task += kThreadsOfRow) {
    const int group = task / d_count, d = task - group * d_count, there = n_count - 4 * group;
    const float *own = weights + 4 * group, *x = values + d;
    float total[4] = {};
    for (int m = 0; m < m_count; ++m, own += n_count, x += d_count) {
#pragma unroll
      for (int i = 0; i < 4; ++i) total[i] += (i < there ? own[i] : 0.0f) * *x;
    }
    float* to = values + (m_count + 4 * group) * d_count + d;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < there) to[i * d_count] = total[i];
    }
  }
}

// The same where n is a multiple of four and d even: two numbers of each. emit(feature, first, second): of the routed.
template <typename Emit>
__device__ inline void mix_row_by_pairs(int lane, int m_count, int n_count, int d_count, const float* weights,
                                        const float* values, Emit emit) {
  const auto pairs = static_cast<unsigned>(d_count) / 2, tasks = static_cast<unsigned>(n_count) / 4 * pairs;
  for (auto task = static_cast<unsigned>(lane); task < tasks; task += kThreadsOfRow) {
    const unsigned group = task / pairs, pair = task - group * pairs;
    const auto* own = reinterpret_cast<const Four32*>(weights) + group;
    const auto* x = reinterpret_cast<const Two32*>(values) + pair;
    float total[4][2] = {};
#pragma unroll 4
    for (int m = 0; m < m_count; ++m, own += n_count / 4, x += pairs) {
      const Four32 w = *own;
      const Two32 both = *x;
#pragma unroll
      for (int i = 0; i < 8; ++i) total[i / 2][i % 2] += w.v[i / 2] * both.v[i % 2];
    }
    const int feature = static_cast<int>(4 * group * d_count + 2 * pair);
#pragma unroll
    for (int i = 0; i < 4; ++i) emit(feature + i * d_count, total[i][0], total[i][1]);
  }
}

// Two numbers, to be stored at once where they are aligned for it.
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

template <typename T>
__global__ void __launch_bounds__(kStackThreads, 1)
    stack_forward_kernel(const __grid_constant__ Stack<T> s, const __grid_constant__ StackMemory memory, float* penalty,
                         float* partials, unsigned* ticket) {
  FASTMOD_DYNAMIC_SHARED(shared);
  const auto part = [&](int offset) { return reinterpret_cast<float*>(shared + offset); };
  float* const input = part(memory.input);      // [x ; routed], each in chunks of its own
  float* const outputs = part(memory.outputs);  // [row][output] of an FNN
  const auto hidden = [&](int i) { return part(memory.hidden + (i & 1) * memory.hidden_bytes); };
  const int per_layer = s.route + s.update, lane = kept(static_cast<int>(threadIdx.x) % kWarp);
  const RowThread r(s);
  float* const row_values = part(memory.values) + r.row * memory.row_values;  // [x ; routed] once more, whole
  const int64_t tile_row = kept(static_cast<int64_t>(blockIdx.x) * kTileRows + lane / 4);
  WeightStream<T, false> stream(s, shared + memory.slots, 0, s.depth * per_layer, true);

  int m = s.m;
  for (int f = r.lane; f < padded(m * s.d); f += kThreadsOfRow) {
    const float value = r.inside && f < m * s.d ? widen(input_of(s, 0)[r.at * m * s.d + f]) : 0.0f;
    put(input, r.row, f, value);
    if (f < m * s.d) row_values[f] = value;
  }
  float excesses = 0;
  for (int l = 0; l < s.depth; ++l) {
    const StackLayer<T> layer = layer_of(s, l, m);
    const int features = m * s.d, values = layer.n * s.d;
    float* saved = layer.saved;  // the section that comes next
    for (int i = 0; i < per_layer; ++i) {
      const bool update = i >= s.route, last = i + 1 == s.route || i + 1 == per_layer;
      const int place = update ? i - s.route : i, width = s.linear[l * per_layer + i].out;
      const T* bias = bias_of(s, l * per_layer + i);
      const float* first = update && !s.context ? input + place_of(0, padded(features)) : input;
      float* const to = hidden(place);
      float* const kept = saved ? saved + tile_row * width : nullptr;
      const bool inside[2] = {tile_row < s.batch, tile_row + 8 < s.batch}, pairs = for_pairs(saved, width);
      const int before = last && update ? values : 0, shown = width - before;  // the logits, of routing or of gates
      T* const logits = (update ? layer.gate : layer.logits) + tile_row * shown;
      __syncthreads();  // what this layer reads has been written, what it writes has been read
      linear_layer(stream, l * per_layer + i, place ? hidden(place - 1) : first,
                   [&](int column, const float(&top)[2], const float(&bottom)[2]) {
        const bool there[2] = {column < width, column + 1 < width};
        const float offset[2] = {there[0] ? widen(bias[column]) : 0.0f, there[1] ? widen(bias[column + 1]) : 0.0f};
        float value[2][2] = {{top[0] + offset[0], top[1] + offset[1]}, {bottom[0] + offset[0], bottom[1] + offset[1]}};
        if (!last) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            float& own = value[j / 2][j % 2];
            own = fmaxf(own, own * static_cast<float>(kLeakySlope));
          }
          put(to, lane / 4, column, value);
        } else {
          float* own = outputs + lane / 4 * width + column;
          store_pair(own, value[0], width % 2 == 0, there);
          store_pair(own + 8 * width, value[1], width % 2 == 0, there);
          if (column + 1 >= before) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const int f = column + j % 2 - before;
              if (!there[j % 2] || f < 0 || !inside[j / 2]) continue;
              narrow(value[j / 2][j % 2], logits + j / 2 * 8 * shown + f);
              if (s.threshold < 0.0f) continue;
              const float over = excess(value[j / 2][j % 2], s.threshold);
              excesses += over * over;
            }
          }
        }
        if (kept && inside[0]) store_pair(kept + column, value[0], pairs, there);
        if (kept && inside[1]) store_pair(kept + 8 * width + column, value[1], pairs, there);
      });
      if (saved) saved += s.batch * width;
      if (last) {
        __syncthreads();
        float* own = outputs + r.row * width;
        if (!update) {
          const RoutingColumn column(s.mode, layer);
          for (int n = r.lane; n < layer.n; n += kThreadsOfRow) {
            column.weigh(own + n, m, layer.n, r.at * width + n);
          }
          __syncwarp(kAllLanes);
          float* routed = saved && r.inside ? saved + r.at * values : nullptr;
          if (layer.n % 4 == 0 && s.d % 2 == 0) {
            const bool together = for_pairs(saved, values);
            mix_row_by_pairs(r.lane, m, layer.n, s.d, own, row_values, [&](int f, float value, float next) {
              put(input, r.row, padded(features) + f, value, next);
              *reinterpret_cast<Two32*>(row_values + features + f) = Two32{{value, next}};
              if (routed) store_pair(routed + f, {value, next}, together, {true, true});
            });
            for (int f = values + r.lane; f < padded(values); f += kThreadsOfRow) {
              put(input, r.row, padded(features) + f, 0.0f);
            }
          } else {
            mix_row(r.lane, m, layer.n, s.d, own, row_values);
            __syncwarp(kAllLanes);
            for (int f = r.lane; f < padded(values); f += kThreadsOfRow) {
              const float value = f < values ? row_values[features + f] : 0.0f;
              put(input, r.row, padded(features) + f, value);
              if (routed && f < values) routed[f] = value;
            }
          }
          if (saved) saved += s.batch * values;
        } else {
          for (int n = r.lane; n < layer.n; n += kThreadsOfRow) {
            const float logit = own[values + n], open = sigmoid(logit), closed = sigmoid(-logit);
            float *fresh = own + n * s.d, *routed = row_values + features + n * s.d;
            for (int d = 0; d < s.d; ++d) fresh[d] = open * fresh[d] + closed * routed[d];
          }
          __syncwarp(kAllLanes);
          T* out = layer.out + r.at * values;
          for (int f = 2 * r.lane; f < padded(values); f += 2 * kThreadsOfRow) {
            float value[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const bool there = f + i < values;
              T rounded;
              narrow(there ? own[f + i] : 0.0f, &rounded);
              value[i] = widen(rounded);
              if (!there) continue;
              row_values[f + i] = value[i];
              if (r.inside) out[f + i] = rounded;
            }
            put(input, r.row, f, value[0], value[1]);
          }
        }
      }
    }
    m = layer.n;
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

template <typename T>
StackMemory stack_memory(const Stack<T>& s, bool backward) {
  int features = 0, whole = 0, hidden = 0, outputs = 0, values = 0, blocks = s.m * s.d, logits = 0, m = s.m;
  const int per_layer = s.route + s.update;
  for (int l = 0; l < s.depth; ++l) {
    const auto larger = [](int a, int b) { return a > b ? a : b; };
    const int n = s.layer[l].n, own = n * s.d, x = m * s.d;
    features = larger(features, chunks_of(x) + chunks_of(own));
    whole = larger(whole, x + own);
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
  memory.slots = take(kSlotBytes<T> / 4);
  if (!backward) {
    memory.input = take(features * kChunkFloats);
    memory.outputs = take(outputs * kTileRows);
    memory.values = take(whole * kTileRows);
    memory.row_values = whole;
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

template <typename T>
bool stack_is_small(const Stack<T>& s) {
  const int linears = s.depth * (s.route + s.update);
  if (s.depth < 1 || s.depth > kStackLayers || s.route < 1 || s.update < 1 || linears > kStackLinears) return false;
  for (int i = 0; i < linears; ++i) {
    const int place = i % (s.route + s.update);
    const bool last = place + 1 == s.route || place + 1 == s.route + s.update;
    if (!last && s.linear[i].out > kMaxHidden) return false;
  }
  return true;
}

template <typename T>
bool stack_fits(const Stack<T>& s) {
  if (!stack_is_small(s)) return false;
  const int limit = shared_limit() - 1024;
  return stack_memory(s, false).bytes <= limit && stack_memory(s, true).bytes <= limit;
}

template <typename T>
cudaError_t smfr_forward(const Stack<T>& stack, float* penalty, float* partials, unsigned* ticket,
                         cudaStream_t stream) {
  if (!stack_is_small(stack)) return cudaErrorInvalidValue;
  if (stack.batch == 0) return cudaSuccess;
  const StackMemory memory = stack_memory(stack, false);
  const unsigned tiles = blocks_for(stack.batch, kTileRows).x;
  return for_copies(stack, [&](const Stack<T>& some, unsigned copies) {
    return FASTMOD_LAUNCH_LARGE(stack_forward_kernel<T>, dim3(tiles, copies), kStackThreads, memory.bytes, stream, some,
                                memory, penalty, partials, ticket);
  });
}

#define FASTMOD_INSTANTIATE(T)                                                                      \
  template StackMemory stack_memory<T>(const Stack<T>&, bool);                                      \
  template bool stack_fits<T>(const Stack<T>&);                                                     \
  template bool stack_is_small<T>(const Stack<T>&);                                                 \
  template cudaError_t smfr_forward<T>(const Stack<T>&, float*, float*, unsigned*, cudaStream_t);
FASTMOD_INSTANTIATE(float)
FASTMOD_INSTANTIATE(__half)
FASTMOD_INSTANTIATE(__nv_bfloat16)

}  // namespace fastmod::cuda
