// In place of torch's header of this name.
#pragma once

namespace c10::cuda {
enum class CaptureStatus : int { None, Active, Invalidated };
inline CaptureStatus currentStreamCaptureStatusMayInitCtx() { return CaptureStatus::None; }
}  // namespace c10::cuda
