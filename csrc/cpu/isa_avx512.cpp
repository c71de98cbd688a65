#include "cpu/isa_headers.h"

#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,prefer-vector-width=512")
#define FASTMOD_ISA avx512
#define FASTMOD_VECTOR_BYTES 64
#include "cpu/instantiate.h"

namespace fastmod::cpu {
extern const Kernels kernels_avx512{"avx512", avx512::make_table<float>(), avx512::make_table<double>()};
}
#endif
