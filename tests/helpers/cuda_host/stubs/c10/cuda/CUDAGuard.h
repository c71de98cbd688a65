// In place of torch's header of this name.
#pragma once

#include <c10/core/Device.h>

namespace c10::cuda {
struct OptionalCUDAGuard {
  explicit OptionalCUDAGuard(c10::Device) {}
  ~OptionalCUDAGuard() {}
};
}  // namespace c10::cuda
