// Shared by the bindings of ops on images: layout, and memory for launches that add up partial results.
#pragma once

#include <ATen/Context.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <algorithm>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

#include "binding.h"

namespace fastmod::cuda::bindings {

// Images in the layout that the kernels read: [..., H, W, C].
inline Tensor inner(const Tensor& images) { return images.movedim(-3, -1).contiguous(); }
inline Tensor inner(const OptionalTensor& images) {
  return images && images->defined() ? inner(*images) : Tensor();
}

// An empty [..., C, H, W] that the kernels write as [..., H, W, C].
inline Tensor empty_images(at::IntArrayRef sizes, const at::TensorOptions& options) {
  std::vector<int64_t> in_memory(sizes.begin(), sizes.end());
  std::rotate(in_memory.end() - 3, in_memory.end() - 2, in_memory.end());
  return at::empty(in_memory, options).movedim(-1, -3);
}

// Parameters [E, ...], copied unless those of each expert are contiguous.
inline Tensor expert_rows(const Tensor& parameters) {
  return parameters.select(0, 0).is_contiguous() ? parameters : parameters.contiguous();
}
// How many numbers are between the parameters of one expert and those of the next; negative if experts share them.
inline int64_t gap_of(const Tensor& parameters) {
  if (parameters.size(0) == 1) return 0;
  return parameters.stride(0) - parameters.numel() / parameters.size(0);
}

inline int small(int64_t size, const char* what) {
  TORCH_CHECK_VALUE(size <= std::numeric_limits<int>::max(), what, ": expected less than 2^31, got ", size);
  return static_cast<int>(size);
}

// Tickets are zero before and after a launch. Launches of one stream run one after the other, so they share the memory
// kept here. A captured graph may run on any stream and gets its own.
inline Tensor tickets_for(const Tensor& like, int64_t count) {
  const auto options = like.options().dtype(at::kInt);
  if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) {
    return at::zeros({count}, options);
  }
  static std::mutex mutex;
  static auto& kept = *new std::map<std::pair<int64_t, cudaStream_t>, Tensor>;  // must outlive the CUDA context
  const std::lock_guard<std::mutex> lock(mutex);
  Tensor& own = kept[{like.get_device(), stream()}];
  if (!own.defined() || own.numel() < count) own = at::zeros({std::max<int64_t>(count, 4096)}, options);
  return own;
}

// Results of an op that writes some of its arguments: for those torch.compile wants a fixed number of tensors instead
// of a list. Unused ones are empty.
template <size_t>
using Each = Tensor;
template <size_t... kPlaces>
std::tuple<Each<kPlaces>...> spread_out(const std::vector<Tensor>& found, std::index_sequence<kPlaces...>) {
  return {(kPlaces < found.size() ? found[kPlaces] : at::empty({0}, found[0].options()))...};
}
template <size_t kCount>
using Results = decltype(spread_out(std::vector<Tensor>(), std::make_index_sequence<kCount>()));

// Memory for one launch.
struct Workspace {
  Tensor numbers, tickets;
  Workspace() = default;
  Workspace(const Tensor& like, Scratch sizes)
      : numbers(at::empty({sizes.numbers}, like.options().dtype(compute_type(like)))),
        tickets(tickets_for(like, sizes.tickets)) {}
};

}  // namespace fastmod::cuda::bindings
