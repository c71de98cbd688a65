// Kernels for any machine: 16-byte vectors are SSE2 on x86-64 and NEON on 64-bit ARM.
#include "cpu/isa_headers.h"

#define FASTMOD_ISA baseline
#define FASTMOD_VECTOR_BYTES 16
#include "fastmod_kernels.h"  // written by setup.py: every *_kernel.h
