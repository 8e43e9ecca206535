// Marks functions that both the CPU's and a CUDA device's code call.
#pragma once

#ifdef __CUDACC__
#define GAS_HOST_DEVICE __host__ __device__
#else
#define GAS_HOST_DEVICE
#endif
