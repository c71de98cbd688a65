// The bindings of csrc/cuda over the harness: the compiler is told to include them before this file, all in one unit,
// as torch's headers take most of the time.
#include "bindings_host.h"

TORCH_LIBRARY(fastmod_cuda_host, m) {
  fastmod::cuda::bindings::Definer definer{m};
  for (const auto define : fastmod::cuda::bindings::definitions) define(definer);
  // What no op may do: by these the recorder is tested.
  m.def("forbidden", [](const at::Tensor& value, int64_t which) {
    const auto kernel = +[](float* out) { *out = 1; };
    if (which == 0) C10_CUDA_CHECK(FASTMOD_LAUNCH(kernel, 1, 1, nullptr, value.data_ptr<float>()));
    if (which == 1) C10_CUDA_CHECK(cudaDeviceSynchronize());
    if (which == 2) C10_CUDA_CHECK(cudaMalloc(nullptr, 4));
    if (which == 3) value.item<float>();
    if (which == 4) C10_CUDA_CHECK(FASTMOD_LAUNCH(kernel, 1, 1, cuda_host::current_stream(), value.data_ptr<float>()));
  });
  m.def("set_order", [](int64_t seed) { cuda_host::set_order(static_cast<uint64_t>(seed)); });
}
