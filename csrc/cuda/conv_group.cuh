// Several convolutions in one launch: each has its own blocks, side by side along x.
#pragma once

#include "conv_tiles.cuh"

namespace fastmod::cuda {

// The blocks of one convolution: deep x down x across, starting at `begin`.
struct Share {
  unsigned begin, across, down;
};

template <typename Task>
struct Group {
  int count = 0;
  Task task[kMaxConvs];
};

template <typename Task>
__device__ inline const Task& own_task(const Group<Task>& group) {
  int i = 0;
  while (i + 1 < group.count && blockIdx.x >= group.task[i + 1].share.begin) ++i;
  return group.task[i];
}
// `deep` only matters if it is 1, which the caller knows.
__device__ inline Block block_of(const Share& share, unsigned deep = 0) {
  const unsigned own = blockIdx.x - share.begin, row = own / share.across, z = row / share.down;
  return {own - row * share.across, row - z * share.down, z, share.across, share.down, deep};
}

// The host's side of a group.
template <typename Task>
struct Grouped {
  Group<Task> group;
  int64_t blocks = 0;
  int bytes = 0;  // bytes of shared memory

  void add(const Task& task, int64_t across, int64_t down, int64_t deep, int needs) {
    Task& own = group.task[group.count++];
    own = task;
    own.share = {static_cast<unsigned>(blocks), static_cast<unsigned>(across), static_cast<unsigned>(down)};
    blocks += across * down * deep;
    bytes = bytes < needs ? needs : bytes;
  }
  bool fits() const { return bytes <= kMaxShared; }
};

// Calls together(convs, count) for convolutions on tensor cores, up to kMaxConvs at a time, and alone(conv) for the
// others; empty ones are skipped.
template <typename T, typename Conv, typename Together, typename Alone>
cudaError_t in_groups(const Conv* convs, int count, Together together, Alone alone) {
  Conv chosen[kMaxConvs];
  int size = 0;
  for (int i = 0; i < count; ++i) {
    const ConvShape& shape = convs[i].shape;
    if (shape.batch == 0) continue;
    cudaError_t error = cudaSuccess;
    if (!on_tensor_cores<T>(shape)) {
      error = alone(convs[i]);
    } else {
      if (size == kMaxConvs) {
        error = together(chosen, size);
        size = 0;
      }
      chosen[size++] = convs[i];
    }
    if (error != cudaSuccess) return error;
  }
  return size > 0 ? together(chosen, size) : cudaSuccess;
}

}  // namespace fastmod::cuda
