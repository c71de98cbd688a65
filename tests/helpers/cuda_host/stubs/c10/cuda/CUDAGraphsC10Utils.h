// In place of torch's header of this name. What a graph captures has tickets of its own, zeroed by a launch.
#pragma once

#include "cuda_host.h"

namespace c10::cuda {
enum class CaptureStatus : int { None, Active, Invalidated };
inline CaptureStatus currentStreamCaptureStatusMayInitCtx() {
  return cuda_host::capturing() ? CaptureStatus::Active : CaptureStatus::None;
}
}  // namespace c10::cuda
