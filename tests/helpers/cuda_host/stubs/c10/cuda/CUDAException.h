// In place of torch's header of this name, so that the bindings of csrc/cuda compile against the CPU build of torch.
#pragma once

#include <c10/util/Exception.h>

#include "cuda_host.h"

#define C10_CUDA_CHECK(call)                                                                            \
  do {                                                                                                  \
    const cudaError_t error = (call);                                                                   \
    TORCH_CHECK(error == cudaSuccess, "launch failed with ", static_cast<int>(error), ": ", cuda_host::message()); \
  } while (0)
