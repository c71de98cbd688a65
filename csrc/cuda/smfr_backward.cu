// SMFR backward through the activations in one launch: a block takes the gradients of kTileRows rows through all
// layers, last to first, and stores those of every linear layer's output for smfr_weight.cu. See smfr.cuh.
#include "smfr.cuh"

namespace fastmod::cuda {
namespace {

struct Parts {
  float *grads, *routed, *grad_x, *x, *weights, *grad_weights;  // each [row][..] except grads, which are activations
};

// Backward of the gated residual: turns the gradient of the output, in grad_x, into those of the update's outputs and
// of routed.
template <typename T, typename W>
__device__ inline void gate_row(const Stack<T, W>& s, int n_count, const RowThread& r, const float* routed,
                                const float* outputs, float penalty, const Parts& p) {
  const int values = n_count * s.d;
  for (int n = r.lane; n < n_count; n += kThreadsOfRow) {
    const float logit = r.inside ? outputs[values + n] : 0.0f, open = sigmoid(logit), closed = sigmoid(-logit);
    float total = 0;
    for (int d = 0; d < s.d; ++d) {
      const int f = n * s.d + d;
      const float grad = p.grad_x[r.row * values + f];
      if (r.inside) total += grad * (outputs[f] - routed[f]);
      p.routed[r.row * values + f] = grad * closed;
      put(p.grads, r.row, f, grad * open);
    }
    total *= open * closed;
    if (penalty != 0.0f && r.inside) total += penalty * excess(logit, s.threshold);
    put(p.grads, r.row, values + n, total);
  }
  for (int f = values + n_count + r.lane; f < chunks_of(values + n_count) * kDepthStep; f += kThreadsOfRow) {
    put(p.grads, r.row, f, 0.0f);
  }
}

// As in multiplex_backward.cu: writes gradients of the logits to p.grads and weights of the forward to p.weights;
// returns the gradient of tau.
template <typename T, typename W>
__device__ inline float route_row(const Stack<T, W>& s, const StackLayer<T>& layer, const RowThread& r, int m_count,
                                  const float* logits, float penalty, const Parts& p) {
  const int n_count = layer.n, width = m_count * n_count, features = m_count * s.d, values = n_count * s.d;
  float* weights = p.weights + r.row * width;
  float* grad_weights = p.grad_weights + r.row * width;
  for (int i = r.lane; i < width; i += kThreadsOfRow) {
    const int m = i / n_count, n = i - m * n_count;
    weights[i] = r.inside ? logits[i] : 0.0f;
    grad_weights[i] = dot(p.routed + r.row * values + n * s.d, p.x + r.row * features + m * s.d, s.d);
  }
  __syncwarp(kAllLanes);
  const RoutingColumn column(s.mode, layer);
  float grad_tau = 0;
  for (int n = r.lane; n < n_count; n += kThreadsOfRow) {
    auto found = column.scores(weights + n, m_count, n_count, r.at * width + n);
    column.add_up(weights + n, m_count, n_count, found);
    float mean = 0, centre = 0;  // means over m of the weights' gradients and of the scores
    for (int m = 0; m < m_count; ++m) {
      const int i = m * n_count + n;
      const float weight = column.soft(weights[i], found);
      mean += weight * grad_weights[i];
      centre += weight * weights[i];
    }
    for (int m = 0; m < m_count; ++m) {
      const int i = m * n_count + n;
      const float score = weights[i], grad = column.soft(score, found) * (grad_weights[i] - mean);
      if (r.inside) grad_tau -= grad * (score - centre) / column.tau;
      float result = grad / column.tau;
      if (penalty != 0.0f && r.inside) result += penalty * excess(logits[i], s.threshold);
      put(p.grads, r.row, i, r.inside ? result : 0.0f);
      weights[i] = column.forward_weight(score, m, found);
    }
  }
  for (int f = width + r.lane; f < chunks_of(width) * kDepthStep; f += kThreadsOfRow) put(p.grads, r.row, f, 0.0f);
  return grad_tau;
}

template <typename T, typename W>
__global__ void __launch_bounds__(kStackThreads, 1)
    stack_backward_kernel(const __grid_constant__ Stack<T, W> s, const __grid_constant__ StackMemory memory,
                          const T* grad_out, const float* grad_penalty, void* grad_x, float* tau_partials) {
  FASTMOD_DYNAMIC_SHARED(shared);
  const auto part = [&](int offset) { return reinterpret_cast<float*>(shared + offset); };
  const Parts p{part(memory.grads), part(memory.routed),  part(memory.grad_x),
                part(memory.x),     part(memory.weights), part(memory.grad_weights)};
  const auto hidden = [&](int i) { return part(memory.hidden + (i & 1) * memory.hidden_bytes); };
  const int per_layer = s.route + s.update;
  // The first linear layer whose gradient is passed on: all are, unless only x would need them.
  const int until = grad_x ? 0 : s.layer[0].grads ? 1 : s.route;
  const bool need = grad_x != nullptr;
  auto* const plans = reinterpret_cast<LinearPlan<T, W>*>(shared + memory.plans);
  for (int i = threadIdx.x; i < s.depth * per_layer; i += kStackThreads) plan_linear<true>(s, i, need, plans + i);
  __syncthreads();
  WeightStream<T, W, true> stream(plans, shared + memory.slots, s.depth * per_layer - 1, until - 1);
  const RowThread r(s);
  const int64_t copy = copy_of(s), row = copy * s.batch + r.at;  // in what holds all copies
  const float penalty = grad_penalty && s.threshold >= 0.0f ? 2.0f * grad_penalty[copy] : 0.0f;

  const int last_values = s.layer[s.depth - 1].n * s.d;
  for (int f = r.lane; f < last_values; f += kThreadsOfRow) {
    p.grad_x[r.row * last_values + f] = grad_out && r.inside ? widen(grad_out[row * last_values + f]) : 0.0f;
  }
  __syncwarp(kAllLanes);
  for (int l = s.depth - 1; l >= 0; --l) {
    const int m = l ? s.layer[l - 1].n : s.m;
    const StackLayer<T> layer = layer_of(s, l, m);
    const Blocks<T> x = input_of(s, l);
    const int features = m * s.d, values = layer.n * s.d, logits = m * layer.n;
    const bool need_x = l > 0 || grad_x;
    // Sections end where those of the current linear layer begin.
    const float* saved = layer.saved;
    float* grads = layer.grads;
    for (int i = 0; i < per_layer; ++i) {
      const int64_t section = s.batch * s.linear[l * per_layer + i].out;
      saved += section;
      if (grads) grads += section;
    }
    saved += s.batch * values;
    float grad_tau = 0;
    for (int i = per_layer - 1; i >= 0; --i) {
      const bool update = i >= s.route, last = i + 1 == s.route || i + 1 == per_layer;
      const int place = update ? i - s.route : i, index = l * per_layer + i, width = s.linear[index].out;
      saved -= s.batch * width;
      if (last) {  // the gradient of the outputs of an FNN
        if (update) {
          const int64_t routed = s.batch * values;  // the section before those of the update layers
          const float* first = saved;
          for (int j = i - 1; j >= s.route; --j) first -= s.batch * s.linear[l * per_layer + j].out;
          gate_row(s, layer.n, r, first - routed + r.at * values, saved + r.at * width, penalty, p);
          for (int f = r.lane; f < features; f += kThreadsOfRow) {
            p.x[r.row * features + f] = r.inside ? read_at(x, r.at * features + f) : 0.0f;
          }
        } else {
          __syncthreads();  // the gradients of routed are complete
          grad_tau = route_row(s, layer, r, m, saved + r.at * width, penalty, p);
          __syncwarp(kAllLanes);
          for (int f = r.lane; f < features && need_x; f += kThreadsOfRow) {
            const int block = f / s.d, d = f - block * s.d;
            float total = s.context ? p.grad_x[r.row * features + f] : 0.0f;
            for (int n = 0; n < layer.n; ++n) {
              total += p.weights[r.row * logits + block * layer.n + n] * p.routed[r.row * values + n * s.d + d];
            }
            p.grad_x[r.row * features + f] = total;
          }
        }
        __syncwarp(kAllLanes);
        if (grads) {
          for (int f = r.lane; f < width && r.inside; f += kThreadsOfRow) {
            grads[r.at * width + f - s.batch * width] = get(p.grads, r.row, f);
          }
        }
      }
      if (grads) grads -= s.batch * width;
      __syncthreads();  // what this layer reads is written, and what it overwrites has been read
      if (index < until) continue;
      const float* from = last ? p.grads : hidden(place);
      float* const to = hidden(place - 1 + 2);
      const int below = s.linear[index].in;
      const float* activations = place ? saved - s.batch * below : nullptr;  // before the linear layer
      const auto emit = [&](int first, float(&found)[2][2][2], float* at_first) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int half = i % 2, column = first + i / 2 * pairs_apart<true>;
          float(&value)[2][2] = found[i / 2];
          const int row = static_cast<int>(threadIdx.x) % kWarp / 4 + 8 * half;
          const int64_t at = static_cast<int64_t>(blockIdx.x) * kTileRows + row;
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int f = column + j;
            const bool there = f < below;
            if (place) {
              if (!there || at >= s.batch) continue;
              if (!(activations[at * below + f] > 0.0f)) value[half][j] *= static_cast<float>(kLeakySlope);
              if (grads) grads[(at - s.batch) * below + f] = value[half][j];
            } else if (update && f < values) {
              p.routed[row * values + f] += value[half][j];
            } else if (update && there && need_x) {
              p.grad_x[row * features + f - values] = value[half][j];
            } else if (!update && there) {
              p.grad_x[row * features + f] += value[half][j];
            }
          }
        }
        if (place) put_at(at_first, found[0]);
        if (place) put_at(at_first + pairs_apart<true>, found[1]);
      };
      if (stream.first_column < plans[index].part[0].columns) linear_layer(stream, plans[index], from, to, emit);
      if (update && place == 0) saved -= s.batch * values;
    }
    __syncthreads();
    if (tau_partials) {
      const float total = block_sum(grad_tau);
      if (threadIdx.x == 0) tau_partials[(copy * s.depth + l) * gridDim.x + blockIdx.x] = total;
      __syncthreads();  // block_sum needs its memory again
    }
  }
  for (int f = r.lane; f < s.m * s.d && grad_x && r.inside; f += kThreadsOfRow) {
    const float value = p.grad_x[r.row * s.m * s.d + f];
    const int64_t at = row * s.m * s.d + f;
    if (s.x.wide) {
      static_cast<float*>(grad_x)[at] = value;
    } else {
      narrow(value, static_cast<T*>(grad_x) + at);
    }
  }
}

}  // namespace

template <typename T, typename W>
cudaError_t smfr_backward(const Stack<T, W>& stack, const T* grad_out, const float* grad_penalty, void* grad_x,
                          float* tau_partials, cudaStream_t stream) {
  if (!stack_is_small(stack)) return cudaErrorInvalidValue;
  if (stack.batch == 0) return cudaSuccess;
  const StackMemory memory = stack_memory(stack, true);
  const unsigned tiles = blocks_for(stack.batch, kTileRows).x;
  return for_copies(stack, [&](const Stack<T, W>& some, unsigned copies) {
    const auto kernel = stack_backward_kernel<T, W>;
    return FASTMOD_LAUNCH_LARGE(kernel, dim3(tiles, copies), kStackThreads, memory.bytes, stream, some, memory,
                                grad_out, grad_penalty, grad_x, tau_partials);
  });
}

#define FASTMOD_INSTANTIATE(T, W) \
  template cudaError_t smfr_backward(const Stack<T, W>&, const T*, const float*, void*, float*, cudaStream_t);
FASTMOD_INSTANTIATE_STACKS

}  // namespace fastmod::cuda
