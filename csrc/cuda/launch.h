// Launch functions of the CUDA kernels: raw pointers to contiguous device memory, no torch. Each returns the error of
// its launch. Empty work returns cudaSuccess without a launch. Nothing is allocated and nothing synchronises.
#pragma once

#include "launch_blocks.h"
#include "launch_masks.h"
#include "launch_images.h"
#include "launch_templates.h"
