#include "cpu/isa_headers.h"

#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#define FASTMOD_ISA avx2
#define FASTMOD_VECTOR_BYTES 32
#include "cpu/instantiate.h"

namespace fastmod::cpu {
extern const Kernels kernels_avx2{"avx2", avx2::make_table<float>(), avx2::make_table<double>()};
}
#endif
