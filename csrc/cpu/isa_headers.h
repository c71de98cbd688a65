// The headers that the kernels use. An isa_*.cpp includes them before it switches to its target, so that standard
// inline functions stay baseline code. Then it defines FASTMOD_ISA and FASTMOD_VECTOR_BYTES and includes every
// *_kernel.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "constants.h"
#include "cpu/kernels.h"
#include "philox.h"
