// The bindings of csrc/cuda over the harness: the compiler is told to include them before this file, all in one unit,
// as torch's headers take most of the time.
#include "bindings_host.h"

TORCH_LIBRARY(fastmod_cuda_host, m) {
  fastmod::cuda::bindings::Definer definer{m};
  for (const auto define : fastmod::cuda::bindings::definitions) define(definer);
  m.def("set_order", [](int64_t seed) { cuda_host::set_order(static_cast<uint64_t>(seed)); });
}
