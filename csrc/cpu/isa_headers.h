// What the kernels use, included before any target is switched on.
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
