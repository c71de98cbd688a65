#include "cpu/isa_headers.h"

#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#define FASTMOD_ISA avx2
#define FASTMOD_VECTOR_BYTES 32
#include "fastmod_kernels.h"  // written by setup.py: every *_kernel.h
#endif
