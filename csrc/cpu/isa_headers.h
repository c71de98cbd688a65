// What the kernels use, included before any target is switched on.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "cpu/kernels.h"
#include "philox.h"
