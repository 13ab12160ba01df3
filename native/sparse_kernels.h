// The table that each build of sparse_kernels.cpp exports; sparse_select.cpp checks and picks one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tacit {

struct SparseKernels {
    const char* name;
    // How many magnitudes of x are `least` or more, as integers: what is not finite is largest.
    std::size_t (*count)(const float* x, std::size_t numel, std::int32_t least);
    // Their places, `first` more than in x, into `room`, which has numel + 16 of them.
    std::size_t (*compact)(const float* x, std::size_t numel, std::uint32_t first, std::int32_t least,
                           std::uint32_t* room);
    // 1 for each block that holds anything but zeros.
    void (*used)(const float* x, std::size_t numel, std::size_t block, std::uint8_t* out);
    // u' = momentum u + x, v' = v + u': v' into `wanted`, and both kept where v' is finite.
    void (*accumulate)(const float* x, std::size_t numel, float momentum, float* u, float* v, float* wanted);
};

namespace baseline {
extern const SparseKernels sparse_kernels;
}
namespace avx2 {
extern const SparseKernels sparse_kernels;
}
namespace avx512 {
extern const SparseKernels sparse_kernels;
}

}  // namespace tacit
