// Launch functions of the CUDA kernels: raw pointers to contiguous device memory, no torch. Each returns the error of
// its launch, or cudaSuccess without a launch if there is no work. They neither allocate nor synchronise.
#pragma once

#include "launch_blocks.h"
#include "launch_masks.h"
#include "launch_images.h"
#include "launch_templates.h"
