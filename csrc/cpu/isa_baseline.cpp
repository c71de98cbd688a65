// Kernels for any machine: 16-byte vectors are SSE2 on x86-64 and NEON on 64-bit ARM.
#include "cpu/isa_headers.h"

#define FASTMOD_ISA baseline
#define FASTMOD_VECTOR_BYTES 16
#include "cpu/instantiate.h"

namespace fastmod::cpu {
extern const Kernels kernels_baseline{"baseline", baseline::make_table<float>(), baseline::make_table<double>()};
}
