#include "cpu/isa_headers.h"

#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,prefer-vector-width=512")
#define FASTMOD_ISA avx512
#define FASTMOD_VECTOR_BYTES 64
#include "fastmod_kernels.h"  // written by setup.py: every *_kernel.h
#endif
