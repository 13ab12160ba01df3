// The table that each build of low_rank_kernels.cpp exports; low_rank.cpp checks, packs and shares out.
#pragma once

#include <cstddef>

namespace tacit {

// The matrix x + e, one row after another.
struct ErrorMatrix {
    const float *x, *e;
    std::size_t rows, columns;
};

constexpr std::size_t most_rank = 256;

struct LowRankKernels {
    const char* name;
    // Floats that `pack_left` and `pack_finish` write, which are then aligned to 64 bytes.
    std::size_t (*left_floats)(std::size_t rank, std::size_t columns);
    void (*pack_left)(const float* q, std::size_t rank, std::size_t columns, float* packed);
    // Rows [begin, end) of p = (x + e) q, from a packed `q`.
    void (*left)(const ErrorMatrix& m, const float* packed, std::size_t rank, std::size_t begin,
                 std::size_t end, float* p);
    // Columns [begin, end) of q = (x + e)^T p; `begin` is a multiple of 16.
    void (*right)(const ErrorMatrix& m, const float* p, std::size_t rank, std::size_t begin, std::size_t end,
                  float* q);
    std::size_t (*finish_floats)(std::size_t rank, std::size_t columns);
    void (*pack_finish)(const float* own, const float* total, std::size_t rank, std::size_t columns,
                        float* packed);
    // Rows [begin, end) of out = p total and e = (x + e) - p own. `error` is m.e, to be written.
    void (*finish)(const ErrorMatrix& m, const float* p, const float* packed, std::size_t rank,
                   std::size_t begin, std::size_t end, float* error, float* out);
    // Likewise, with `out` written past the caches: for large matrices, whose rows of `out` are aligned to 64
    // bytes.
    void (*finish_past)(const ErrorMatrix& m, const float* p, const float* packed, std::size_t rank,
                        std::size_t begin, std::size_t end, float* error, float* out);
    // v -= factor * off, where there is an `off`; then v . with, or v . v where there is no `with`. `v` has
    // zeros up to a multiple of 16.
    double (*project)(double* v, const float* off, double factor, const float* with, std::size_t length);
};

namespace baseline {
extern const LowRankKernels low_rank_kernels;
}
namespace avx2 {
extern const LowRankKernels low_rank_kernels;
}
namespace avx512 {
extern const LowRankKernels low_rank_kernels;
}

}  // namespace tacit
