// csrc/cuda/bindings.cpp over the harness: its ops become torch.ops.fastmod_cuda_host.*, on CPU tensors.
#include <torch/library.h>

#include "cuda_host.h"

namespace fastmod::cuda::bindings {
struct Definer {  // takes the place of the torch::Library that bindings.cpp fills
  torch::Library& library;
  template <typename Function>
  void impl(const char* name, Function* function) {
    library.def(name, function);
  }
};
}  // namespace fastmod::cuda::bindings

#undef TORCH_LIBRARY_IMPL
#define TORCH_LIBRARY_IMPL(name, key, m) static void define_all(Definer& m)
#include "../../../csrc/cuda/bindings.cpp"

TORCH_LIBRARY(fastmod_cuda_host, m) {
  fastmod::cuda::bindings::Definer definer{m};
  fastmod::cuda::bindings::define_all(definer);
  m.def("set_order", [](int64_t seed) { cuda_host::set_order(static_cast<uint64_t>(seed)); });
}
