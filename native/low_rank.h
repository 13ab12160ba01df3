// The power iteration of src/tacit/codecs/low_rank.py: a matrix as the product of two thin factors.
//
// The matrix x + e has rows of columns, one after another. Factors lie one column after another: `p` has
// `rank` columns of `rows` floats, `q`, `own` and `total` have `rank` columns of `columns`. Outputs overlap
// nothing else. Any number of threads and any instruction set give the same bits. A matrix without an element
// is left alone, and so are its factors. Wrong sizes throw std::invalid_argument.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tacit {

template <class Float>
struct Factor {
    std::span<Float> all;
    std::size_t rank, length;
};

// p = (x + e) q.
void low_rank_left(std::span<const float> x, std::span<const float> e, Factor<const float> q, Factor<float> p,
                   int threads);

// q = (x + e)^T p.
void low_rank_right(std::span<const float> x, std::span<const float> e, Factor<const float> p,
                    Factor<float> q, int threads);

// out = p total^T and e = (x + e) - p own^T, in one pass over memory. Where that is not finite, e stays.
void low_rank_finish(std::span<const float> x, std::span<float> e, Factor<const float> p,
                     Factor<const float> own, Factor<const float> total, std::span<float> out, int threads);

// Makes the columns of `p` orthonormal, of any magnitude. One that is zero or depends on those before it is
// replaced by a random one, by `seed`; those beyond its length by zeros. Returns how many these were. A
// factor that is not finite becomes NaN.
std::size_t low_rank_orthonormalize(Factor<float> p, std::uint64_t seed);

// ---- the same for many matrices of one vector, in one call

// Of each: where it starts in the vector, its rows, its columns and its rank. The factors of all lie one
// behind the other, in this order, in one vector for each side.
using Matrices = std::span<const std::int64_t>;

void low_rank_lefts(std::span<const float> x, std::span<const float> e, Matrices matrices,
                    std::span<const float> q, std::span<float> p, int threads);
void low_rank_rights(std::span<const float> x, std::span<const float> e, Matrices matrices,
                     std::span<const float> p, std::span<float> q, int threads);
void low_rank_finishes(std::span<const float> x, std::span<float> e, Matrices matrices,
                       std::span<const float> p, std::span<const float> own, std::span<const float> total,
                       std::span<float> out, int threads);

// Of each factor: its rank and its length; every one has a seed of its own, which follows from `seed`.
std::size_t low_rank_orthonormalize_all(std::span<float> p, std::span<const std::int64_t> shapes,
                                        std::uint64_t seed);

}  // namespace tacit
