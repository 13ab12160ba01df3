// Rows of sharded tables (src/tacit/rows): who owns a key, a new row's values, the sum of several ranks'
// gradients, and the row optimizers.
//
// Any number of threads and any instruction set give the same bits. Weights are float32 or bfloat16, one row
// after another; everything is computed in float32. `rows` of an optimizer are strictly increasing, and only
// they and their state are touched. Wrong sizes throw std::invalid_argument.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tacit {

struct RowWeights {
    void* data;
    bool bf16;
    std::size_t rows, width;
};

// `order` becomes the positions of `keys` by owner, each owner's in the order given; `counts` how many each
// has. The owner of a key is mix(table, key) mod counts.size().
void row_route(std::span<const std::int64_t> keys, std::uint64_t table, std::span<std::int64_t> order,
               std::span<std::int64_t> counts);

// The first values of rows, which follow from (seed, table, key) alone: `out` has a row of `width` a key.
// Uniform in [-scale, scale), or the sum of 12 uniforms, which is normal up to 6 deviations of size `scale`.
void row_values(std::span<const std::int64_t> keys, std::uint64_t table, std::uint64_t seed, bool normal,
                float scale, std::size_t width, std::span<float> out, int threads);

// out[t] = (the sum of the gradients whose target is t, in the order given) / count.
void row_sums(std::span<const float> gradients, std::span<const std::int64_t> targets, std::size_t width,
              float count, std::span<float> out, int threads);

// The same by integers, in any order the same bits: the sum of round(gradient * 2^exponent) in 64 bits, times
// 2^-exponent / count. A gradient beyond 2^(50 - exponent) counts as that; a row with one that is not finite
// becomes NaN.
void row_exact_sums(std::span<const float> gradients, std::span<const std::int64_t> targets,
                    std::size_t width, int exponent, float count, std::span<float> out, int threads);

// ---- optimizers: g is a row of `gradients`, w the row of weights that `rows` names

// w -= rate g.
void row_sgd(RowWeights weights, std::span<const std::int64_t> rows, std::span<const float> gradients,
             float rate, int threads);

// s += g^2;  w -= rate g / (sqrt(s) + eps).
void row_adagrad(RowWeights weights, std::span<float> squares, std::span<const std::int64_t> rows,
                 std::span<const float> gradients, float rate, float eps, int threads);

// The same with one s a row, s += the mean of g^2.
void row_row_adagrad(RowWeights weights, std::span<float> squares, std::span<const std::int64_t> rows,
                     std::span<const float> gradients, float rate, float eps, int threads);

// McMahan et al. 2013: n' = n + g^2;  z += g - (sqrt(n') - sqrt(n)) / rate w;
// w = 0 where |z| <= l1, else (sign(z) l1 - z) / ((beta + sqrt(n')) / rate + l2).
void row_ftrl(RowWeights weights, std::span<float> z, std::span<float> squares,
              std::span<const std::int64_t> rows, std::span<const float> gradients, float rate, float beta,
              float l1, float l2, int threads);

// m += (1 - beta1) (g - m);  v += (1 - beta2) (g^2 - v);  w -= rate m / (sqrt(v) + eps). `rate` has the bias
// corrections of the step in it.
void row_lazy_adam(RowWeights weights, std::span<float> m, std::span<float> v,
                   std::span<const std::int64_t> rows, std::span<const float> gradients, float rate,
                   float beta1, float beta2, float eps, int threads);

}  // namespace tacit
