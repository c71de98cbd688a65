// SMFR forward in one launch: a block takes kTileRows rows through all layers of the stack. See smfr.cuh.
#include "smfr.cuh"

namespace fastmod::cuda {
namespace {

__device__ inline float squared_excess(float value, float threshold) {
  const float over = threshold >= 0.0f ? excess(value, threshold) : 0.0f;
  return over * over;
}

// Logits of the row -> weights, in place.
template <typename T>
__device__ inline void route_row(const Stack<T>& s, const StackLayer<T>& layer, const RowThread& r, int m_count,
                                 float* logits) {
  const RoutingColumn column(s.mode, layer);
  for (int n = r.lane; n < layer.n; n += kThreadsOfRow) {
    float* own = logits + n;
    const int64_t index = r.at * m_count * layer.n + n;
    const RoutingColumn::Extremes found = column.scores(own, m_count, layer.n, index);
    for (int m = 0; m < m_count; ++m) {
      float& weight = own[m * layer.n];
      weight = column.forward_weight(weight, m, found);
    }
  }
}

// Four outputs of the routed blocks at a time, so that each value of x is read once for them.
template <typename T>
__device__ inline void mix_row(const Stack<T>& s, const StackLayer<T>& layer, const RowThread& r, int m_count,
                               int routed_at, const float* weights, float* input, float* saved) {
  const int d_count = s.d, groups = (layer.n + 3) / 4;
  for (int task = r.lane; task < groups * d_count; task += kThreadsOfRow) {
    const int n0 = task / d_count * 4, d = task - n0 / 4 * d_count;
    float total[4] = {};
    const float* own = weights + n0;
    const int there = layer.n - n0;
#pragma unroll 2
    for (int m = 0; m < m_count; ++m, own += layer.n) {
      const float x = get(input, r.row, m * d_count + d);
#pragma unroll
      for (int i = 0; i < 4; ++i) total[i] += (i < there ? own[i] : 0.0f) * x;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i >= there) break;
      const int feature = (n0 + i) * d_count + d;
      put(input, r.row, routed_at + feature, total[i]);
      if (saved && r.inside) saved[feature] = total[i];
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kStackThreads, 1)
    stack_forward_kernel(const __grid_constant__ Stack<T> s, const __grid_constant__ StackMemory memory, float* penalty,
                         float* partials, unsigned* ticket) {
  FASTMOD_DYNAMIC_SHARED(shared);
  float* const input = reinterpret_cast<float*>(shared + memory.input);      // [x ; routed]
  float* const outputs = reinterpret_cast<float*>(shared + memory.outputs);  // [row][output] of an FNN
  const auto hidden = [&](int i) {
    return reinterpret_cast<float*>(shared + memory.hidden + i % 2 * memory.hidden_bytes);
  };
  const int per_layer = s.route + s.update;
  WeightStream<T, false> stream(s, shared + memory.slots, 0, s.depth * per_layer, true);
  const RowThread r(s);

  int m = s.m;
  for (int f = r.lane; f < chunks_of(m * s.d) * kDepthStep; f += kThreadsOfRow) {
    put(input, r.row, f, r.inside && f < m * s.d ? widen(s.x[r.at * m * s.d + f]) : 0.0f);
  }
  float excesses = 0;
  for (int l = 0; l < s.depth; ++l) {
    const StackLayer<T>& layer = s.layer[l];
    const int features = m * s.d, logits = m * layer.n, values = layer.n * s.d;
    const int routed_at = s.context ? features : chunks_of(features) * kDepthStep;
    float* saved = layer.saved;  // the section that comes next
    for (int i = 0; i < per_layer; ++i) {
      const bool update = i >= s.route, last = i + 1 == s.route || i + 1 == per_layer;
      const int place = update ? i - s.route : i, width = s.linear[l * per_layer + i].out;
      const T* bias = s.linear[l * per_layer + i].bias;
      const float* from = place ? hidden(place - 1) : update && !s.context ? input + place_of(0, routed_at) : input;
      float* const to = hidden(place);
      __syncthreads();  // what this layer reads has been written, what it writes has been read
      linear_layer(stream, l * per_layer + i, from, [&](int row, int column, float first, float second) {
        const int64_t at = static_cast<int64_t>(blockIdx.x) * kTileRows + row;
        const float value[2] = {first, second};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const bool there = column + j < width;
          float result = there ? value[j] + widen(bias[column + j]) : 0.0f;
          if (last) {
            if (there) outputs[row * width + column + j] = result;
          } else {
            result = result > 0.0f ? result : result * static_cast<float>(kLeakySlope);
            put(to, row, column + j, result);
            if (there && saved && at < s.batch) saved[at * width + column + j] = result;
          }
        }
      });
      if (last) {
        __syncthreads();
        float* own = outputs + r.row * width;
        for (int f = r.lane; f < width && r.inside; f += kThreadsOfRow) {
          const float value = own[f];
          if (saved) saved[r.at * width + f] = value;
          if (!update) narrow(value, layer.logits + r.at * logits + f);
          if (update && f >= values) narrow(value, layer.gate + r.at * layer.n + f - values);
          if (!update || f >= values) excesses += squared_excess(value, s.threshold);
        }
      }
      if (saved) saved += s.batch * width;
      if (!last) continue;
      __syncwarp(kAllLanes);
      float* own = outputs + r.row * width;
      if (!update) {
        route_row(s, layer, r, m, own);
        __syncwarp(kAllLanes);
        mix_row(s, layer, r, m, routed_at, own, input, saved ? saved + r.at * values : nullptr);
        for (int f = routed_at + values + r.lane; f < chunks_of(routed_at + values) * kDepthStep; f += kThreadsOfRow) {
          put(input, r.row, f, 0.0f);
        }
        if (saved) saved += s.batch * values;
      } else {
        for (int n = r.lane; n < layer.n; n += kThreadsOfRow) {
          const float logit = own[values + n], open = sigmoid(logit), closed = sigmoid(-logit);
          for (int d = 0; d < s.d; ++d) {
            float& fresh = own[n * s.d + d];
            fresh = open * fresh + closed * get(input, r.row, routed_at + n * s.d + d);
          }
        }
        __syncwarp(kAllLanes);
        for (int f = r.lane; f < chunks_of(values) * kDepthStep; f += kThreadsOfRow) {
          T rounded;
          narrow(f < values ? own[f] : 0.0f, &rounded);
          put(input, r.row, f, widen(rounded));
          if (f < values && r.inside) layer.out[r.at * values + f] = rounded;
        }
      }
    }
    m = layer.n;
  }

  __syncthreads();
  const float total = block_sum(excesses);
  if (threadIdx.x == 0) partials[blockIdx.x] = total;
  if (!last_to_arrive(ticket, gridDim.x)) return;
  float sum = 0;
  for (int i = threadIdx.x; i < static_cast<int>(gridDim.x); i += kStackThreads) sum += fresh(partials + i);
  __syncthreads();
  sum = block_sum(sum);
  if (threadIdx.x == 0) *penalty = sum;
}

}  // namespace

template <typename T>
StackMemory stack_memory(const Stack<T>& s, bool backward) {
  int features = 0, hidden = 0, outputs = 0, values = 0, blocks = s.m * s.d, logits = 0, m = s.m;
  const int per_layer = s.route + s.update;
  for (int l = 0; l < s.depth; ++l) {
    const auto larger = [](int a, int b) { return a > b ? a : b; };
    const int n = s.layer[l].n, own = n * s.d, x = m * s.d;
    features = larger(features, chunks_of((s.context ? x : chunks_of(x) * kDepthStep) + own));
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
  return FASTMOD_LAUNCH_LARGE(stack_forward_kernel<T>, blocks_for(stack.batch, kTileRows), kStackThreads, memory.bytes,
                              stream, stack, memory, penalty, partials, ticket);
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
