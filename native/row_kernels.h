// The table that each build of row_kernels.cpp exports; rows.cpp checks and shares out.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tacit {

// What an optimizer works on: row rows[i] of the weights with gradient i.
struct RowUpdate {
    void* weights = nullptr;
    std::size_t width = 0;
    const std::int64_t* rows = nullptr;
    const float* gradients = nullptr;
    float *first = nullptr, *second = nullptr;  // state
    float rate = 0, beta1 = 0, beta2 = 0, eps = 0, l1 = 0, l2 = 0;
};

// Of [begin, end) of the rows.
using UpdateRows = void (*)(const RowUpdate& update, std::size_t begin, std::size_t end);

// Gradients by target: those of target t are number order[starts[t]] to order[starts[t + 1] - 1].
struct RowRuns {
    const float* gradients;
    const std::int64_t *order, *starts;
    std::size_t width;
    float count;
    double scale;  // 2^exponent; exact sums only
    float* out;
};

struct RowKernels {
    const char* name;
    // [0] for float32 weights, [1] for bfloat16.
    UpdateRows sgd[2], adagrad[2], row_adagrad[2], ftrl[2], lazy_adam[2];
    // Of targets [begin, end).
    void (*sums)(const RowRuns& runs, std::size_t begin, std::size_t end);
    // Likewise; `space` has 2 * width integers.
    void (*exact_sums)(const RowRuns& runs, std::int64_t* space, std::size_t begin, std::size_t end);
};

namespace baseline {
extern const RowKernels row_kernels;
}
namespace avx2 {
extern const RowKernels row_kernels;
}
namespace avx512 {
extern const RowKernels row_kernels;
}

}  // namespace tacit
