// Included before the bindings of csrc/cuda: their ops become torch.ops.fastmod_cuda_host.*, on CPU tensors.
#pragma once

#include <torch/library.h>

#include <vector>

#include "cuda_host.h"

namespace fastmod::cuda::bindings {

struct Definer {  // takes the place of the torch::Library that a binding fills
  torch::Library& library;
  template <typename Function>
  void impl(const char* name, Function* function) {
    library.def(name, function);
  }
};

using Define = void (*)(Definer&);
inline std::vector<Define> definitions;

}  // namespace fastmod::cuda::bindings

#undef TORCH_LIBRARY_IMPL
#define TORCH_LIBRARY_IMPL(name, key, m) FASTMOD_DEFINE_LATER(C10_CONCATENATE(define_, C10_UID), m)
#define FASTMOD_DEFINE_LATER(define, m)                                                  \
  static void define(Definer& m);                                                        \
  [[maybe_unused]] static const bool C10_CONCATENATE(noted_, C10_UID) =                  \
      (::fastmod::cuda::bindings::definitions.push_back(define), true);                  \
  void define(Definer& m)
