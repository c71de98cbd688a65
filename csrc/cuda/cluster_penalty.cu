// cluster_penalty: squared distances between templates, summed over differences: norms minus products would cancel for
// near templates.
#include "reduce.cuh"

namespace fastmod::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kTemplates = 32;                 // a block pairs kTemplates templates with kTemplates others
constexpr int kColumns = 32;                   // at a time in shared memory
constexpr int kPart = 512;                     // columns of a block in total
constexpr int kPitch = kTemplates + 4;
constexpr int kPairs = kTemplates * kTemplates;
constexpr int kSlices = kThreads / (kPairs / 16);  // a thread has 4 x 4 pairs and every kSlices-th column

template <typename C>
struct alignas(16) Fours {
  C v[4];
};
template <typename C>
__device__ inline Fours<C> four_at(const C* from) {
  return *reinterpret_cast<const Fours<C>*>(from);
}

// Templates first .. first + kTemplates of kColumns columns, [column][template]; zeros beyond the edges.
template <typename T>
__device__ inline void hold(const T* bank, int64_t templates, int64_t size, int64_t first, int64_t column, int64_t end,
                            Compute<T>* to) {
  for (int i = threadIdx.x; i < kTemplates * kColumns; i += kThreads) {
    const int row = i / kColumns, at = i % kColumns;
    const bool inside = first + row < templates && column + at < end;
    to[at * kPitch + row] = inside ? widen(bank[(first + row) * size + column + at]) : Compute<T>(0);
  }
}

__host__ __device__ inline int64_t groups_of(int64_t templates) { return (templates + kTemplates - 1) / kTemplates; }

// Grid axis y counts the pairs (i, j), i <= j, of groups of templates: row i begins at i * groups - i (i - 1) / 2.
__device__ inline void pair_of(int64_t index, int64_t groups, int64_t* i, int64_t* j) {
  *i = 0;
  while (index >= groups - *i) index -= groups - (*i)++;
  *j = *i + index;
}

// Scratch: [pairs of groups, parts, kPairs].
template <typename T>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const T* bank, double* table, Compute<T>* partials, unsigned* tickets, int64_t templates,
                   int64_t size) {
  using C = Compute<T>;
  FASTMOD_SHARED(Fours<C>, left_memory, kColumns * kPitch / 4);
  FASTMOD_SHARED(Fours<C>, right_memory, kColumns * kPitch / 4);
  FASTMOD_SHARED(C, sums, kPairs);
  C *left = left_memory->v, *right = right_memory->v;
  int64_t group_i, group_j;
  pair_of(blockIdx.y, groups_of(templates), &group_i, &group_j);
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kPart, end = begin + kPart < size ? begin + kPart : size;
  const int slice = threadIdx.x % kSlices, of = threadIdx.x / kSlices, i0 = of / 8 * 4, j0 = of % 8 * 4;
  const C* other = group_i == group_j ? left : right;
  C total[4][4] = {};
  for (int64_t column = begin; column < end; column += kColumns) {
    __syncthreads();  // the previous columns have been read
    hold(bank, templates, size, group_i * kTemplates, column, end, left);
    if (group_i != group_j) hold(bank, templates, size, group_j * kTemplates, column, end, right);
    __syncthreads();
    C part[4][4] = {};
#pragma unroll 4
    for (int at = slice; at < kColumns; at += kSlices) {
      const auto a = four_at(left + at * kPitch + i0), b = four_at(other + at * kPitch + j0);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) part[i][j] += (a.v[i] - b.v[j]) * (a.v[i] - b.v[j]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) total[i][j] += part[i][j];  // short sums lose fewer digits
    }
  }
#pragma unroll
  for (int which = 0; which < kSlices; ++which) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        C* sum = sums + (i0 + i) * kTemplates + j0 + j;
        if (slice == which) *sum = which == 0 ? total[i][j] : *sum + total[i][j];
      }
    }
  }
  __syncthreads();
  C* own = partials + static_cast<int64_t>(blockIdx.y) * gridDim.x * kPairs;
  for (int i = threadIdx.x; i < kPairs; i += kThreads) own[static_cast<int64_t>(blockIdx.x) * kPairs + i] = sums[i];
  unsigned* ticket = tickets + blockIdx.y * reduce_tickets<kGroup>(gridDim.x);
  reduce_in_order<kGroup>(ticket, blockIdx.x, gridDim.x, [&](unsigned first, unsigned last, unsigned step, bool all) {
    for (int i = threadIdx.x; i < kPairs; i += kThreads) {
      double found = 0;
#pragma unroll 4
      for (int64_t part = first; part < last; part += step) found += fresh(own + part * kPairs + i);
      if (!all) {
        own[static_cast<int64_t>(first) * kPairs + i] = static_cast<C>(found);
        continue;
      }
      const int64_t row = group_i * kTemplates + i / kTemplates, column = group_j * kTemplates + i % kTemplates;
      if (row >= templates || column >= templates) continue;
      table[row * templates + column] = found;
      if (group_i != group_j) table[column * templates + row] = found;
    }
  });
}

// Rows of sum_j w[k, j] * (template k - template j) with w = 2 (grad + grad^T), as the table holds each pair twice. A
// block has kTemplates templates k; a thread takes four of them and two columns at a time.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const double* grad, const T* bank, T* grad_bank, int64_t templates, int64_t size) {
  using C = Compute<T>;
  FASTMOD_SHARED(Fours<C>, own_memory, kColumns * kPitch / 4);
  FASTMOD_SHARED(Fours<C>, others_memory, kColumns * kPitch / 4);
  FASTMOD_SHARED(Fours<C>, weights_memory, kTemplates * kPitch / 4);  // [j][k]
  C *own = own_memory->v, *others = others_memory->v, *weights = weights_memory->v;
  const int64_t k0 = static_cast<int64_t>(blockIdx.y) * kTemplates, begin = static_cast<int64_t>(blockIdx.x) * kPart;
  const int64_t end = begin + kPart < size ? begin + kPart : size;
  const int k = threadIdx.x / 16 * 4, c = threadIdx.x % 16 * 2;
  for (int64_t column = begin; column < end; column += kColumns) {
    C total[2][4] = {};
    for (int64_t j0 = 0; j0 < templates; j0 += kTemplates) {
      __syncthreads();  // the previous contents have been read
      if (j0 == 0) hold(bank, templates, size, k0, column, end, own);
      hold(bank, templates, size, j0, column, end, others);
      if (column == begin || templates > kTemplates) {
        for (int i = threadIdx.x; i < kPairs; i += kThreads) {
          const int64_t row = k0 + i / kTemplates, to = j0 + i % kTemplates;
          const bool inside = row < templates && to < templates;
          const double both = inside ? grad[row * templates + to] + grad[to * templates + row] : 0.0;
          weights[i % kTemplates * kPitch + i / kTemplates] = static_cast<C>(2 * both);
        }
      }
      __syncthreads();
      const Fours<C> mine[2] = {four_at(own + c * kPitch + k), four_at(own + (c + 1) * kPitch + k)};
      const int count = templates - j0 < kTemplates ? static_cast<int>(templates - j0) : kTemplates;
#pragma unroll 4
      for (int j = 0; j < count; ++j) {
        const auto weight = four_at(weights + j * kPitch + k);
#pragma unroll
        for (int at = 0; at < 2; ++at) {
          const C other = others[(c + at) * kPitch + j];
#pragma unroll
          for (int i = 0; i < 4; ++i) total[at][i] += weight.v[i] * (mine[at].v[i] - other);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int at = 0; at < 2; ++at) {
        if (k0 + k + i < templates && column + c + at < end) {
          narrow(total[at][i], grad_bank + (k0 + k + i) * size + column + c + at);
        }
      }
    }
  }
}

int64_t parts_of(int64_t size) { return (size + kPart - 1) / kPart; }
int64_t pairs_of(int64_t templates) { return groups_of(templates) * (groups_of(templates) + 1) / 2; }

}  // namespace

template <typename T>
Scratch cluster_penalty_forward_scratch(int64_t templates, int64_t size) {
  const int64_t parts = parts_of(size), pairs = pairs_of(templates);
  return {pairs * parts * kPairs, pairs * reduce_tickets<kGroup>(parts)};
}

template <typename T>
cudaError_t cluster_penalty_forward(const T* bank, double* table, Compute<T>* scratch, unsigned* tickets,
                                    int64_t templates, int64_t size, cudaStream_t stream) {
  if (templates * size == 0) return cudaSuccess;
  const dim3 grid(blocks_for(parts_of(size), 1).x, blocks_for(pairs_of(templates), 1).x);
  return FASTMOD_LAUNCH(forward_kernel<T>, grid, kThreads, stream, bank, table, scratch, tickets, templates, size);
}

template <typename T>
cudaError_t cluster_penalty_backward(const double* grad, const T* bank, T* grad_bank, int64_t templates, int64_t size,
                                     cudaStream_t stream) {
  if (templates * size == 0) return cudaSuccess;
  const dim3 grid(blocks_for(parts_of(size), 1).x, blocks_for(groups_of(templates), 1).x);
  return FASTMOD_LAUNCH(backward_kernel<T>, grid, kThreads, stream, grad, bank, grad_bank, templates, size);
}

#define FASTMOD_INSTANTIATE(T)                                                                                         \
  template Scratch cluster_penalty_forward_scratch<T>(int64_t, int64_t);                                               \
  template cudaError_t cluster_penalty_forward<T>(const T*, double*, Compute<T>*, unsigned*, int64_t, int64_t,         \
                                                  cudaStream_t);                                                       \
  template cudaError_t cluster_penalty_backward<T>(const double*, const T*, T*, int64_t, int64_t, cudaStream_t);
FASTMOD_INSTANTIATE(float)
FASTMOD_INSTANTIATE(double)
FASTMOD_INSTANTIATE(__half)
FASTMOD_INSTANTIATE(__nv_bfloat16)

}  // namespace fastmod::cuda
