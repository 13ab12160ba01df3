// The loops over elements of rows. As kernels.cpp: compiled once an instruction set, the same bits from all,
// and nothing from the standard library but types.
#include "row_kernels.h"

namespace {

using std::int64_t;
using std::size_t;
using std::uint32_t;
using tacit::RowRuns;
using tacit::RowUpdate;

// A bfloat16 is the upper half of a float32.
struct Half {
    std::uint16_t bits;
};

inline float load(float w) { return w; }
inline float load(Half w) { return __builtin_bit_cast(float, uint32_t(w.bits) << 16); }

inline void store(float& w, float x) { w = x; }
// To the nearest, ties to even; NaN stays NaN.
inline void store(Half& w, float x) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, x);
    const uint32_t nearest = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
    w.bits = std::uint16_t(x == x ? nearest : bits >> 16 | 0x40u);
}

inline float root(float x) { return __builtin_sqrtf(x); }

template <class W>
struct Row {
    W* __restrict w;
    const float* __restrict g;
    size_t at;  // of its first element in state of the weights' shape
};

template <class W>
Row<W> row(const RowUpdate& u, size_t i) {
    const size_t at = size_t(u.rows[i]) * u.width;
    return {static_cast<W*>(u.weights) + at, u.gradients + i * u.width, at};
}

template <class W>
void sgd(const RowUpdate& u, size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
        const auto [w, g, at] = row<W>(u, i);
        for (size_t k = 0; k < u.width; ++k) store(w[k], load(w[k]) - u.rate * g[k]);
    }
}

template <class W>
void adagrad(const RowUpdate& u, size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
        const auto [w, g, at] = row<W>(u, i);
        float* __restrict s = u.first + at;
        for (size_t k = 0; k < u.width; ++k) {
            s[k] += g[k] * g[k];
            store(w[k], load(w[k]) - u.rate * (g[k] / (root(s[k]) + u.eps)));
        }
    }
}

template <class W>
void row_adagrad(const RowUpdate& u, size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
        const auto [w, g, at] = row<W>(u, i);
        double sum = 0;
        for (size_t k = 0; k < u.width; ++k) sum += double(g[k]) * double(g[k]);
        float& s = u.first[u.rows[i]];
        s += float(sum / double(u.width));
        const float step = u.rate / (root(s) + u.eps);
        for (size_t k = 0; k < u.width; ++k) store(w[k], load(w[k]) - step * g[k]);
    }
}

template <class W>
void ftrl(const RowUpdate& u, size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
        const auto [w, g, at] = row<W>(u, i);
        float* __restrict z = u.first + at;
        float* __restrict n = u.second + at;
        for (size_t k = 0; k < u.width; ++k) {
            const float before = root(n[k]);
            n[k] += g[k] * g[k];
            const float after = root(n[k]);
            const float sum = z[k] + (g[k] - (after - before) / u.rate * load(w[k]));
            z[k] = sum;
            const float size = sum < 0 ? -sum : sum;
            const float off = sum < 0 ? -u.l1 : u.l1;
            const float moved = (off - sum) / ((u.beta1 + after) / u.rate + u.l2);
            store(w[k], size <= u.l1 ? 0.0f : moved);
        }
    }
}

template <class W>
void lazy_adam(const RowUpdate& u, size_t begin, size_t end) {
    const float other1 = 1 - u.beta1, other2 = 1 - u.beta2;
    for (size_t i = begin; i < end; ++i) {
        const auto [w, g, at] = row<W>(u, i);
        float* __restrict m = u.first + at;
        float* __restrict v = u.second + at;
        for (size_t k = 0; k < u.width; ++k) {
            m[k] += other1 * (g[k] - m[k]);
            v[k] += other2 * (g[k] * g[k] - v[k]);
            store(w[k], load(w[k]) - u.rate * (m[k] / (root(v[k]) + u.eps)));
        }
    }
}

// ---- sums

void sums(const RowRuns& runs, size_t begin, size_t end) {
    for (size_t t = begin; t < end; ++t) {
        float* __restrict out = runs.out + t * runs.width;
        for (size_t k = 0; k < runs.width; ++k) out[k] = 0;
        for (int64_t i = runs.starts[t]; i < runs.starts[t + 1]; ++i) {
            const float* __restrict g = runs.gradients + size_t(runs.order[i]) * runs.width;
            for (size_t k = 0; k < runs.width; ++k) out[k] += g[k];
        }
        for (size_t k = 0; k < runs.width; ++k) out[k] /= runs.count;
    }
}

// To the nearest integer, ties to even: what a double of this size keeps behind the point is nothing.
inline int64_t rounded(double x) {
    constexpr double limit = 0x1p50, magic = 0x1.8p52;
    x = x > limit ? limit : x;
    x = x < -limit ? -limit : x;
    return __builtin_bit_cast(int64_t, x + magic) - __builtin_bit_cast(int64_t, magic);
}

void exact_sums(const RowRuns& runs, int64_t* space, size_t begin, size_t end) {
    int64_t* __restrict sum = space;
    int64_t* __restrict broken = space + runs.width;
    for (size_t t = begin; t < end; ++t) {
        for (size_t k = 0; k < 2 * runs.width; ++k) space[k] = 0;
        for (int64_t i = runs.starts[t]; i < runs.starts[t + 1]; ++i) {
            const float* __restrict g = runs.gradients + size_t(runs.order[i]) * runs.width;
            for (size_t k = 0; k < runs.width; ++k) {
                sum[k] += rounded(double(g[k]) * runs.scale);
                broken[k] |= g[k] - g[k] != 0;  // NaN and infinity
            }
        }
        int64_t any = 0;
        for (size_t k = 0; k < runs.width; ++k) any |= broken[k];
        float* __restrict out = runs.out + t * runs.width;
        for (size_t k = 0; k < runs.width; ++k)
            out[k] = any ? __builtin_nanf("") : float(double(sum[k]) / runs.scale / double(runs.count));
    }
}

}  // namespace

#define TACIT_TEXT_(x) #x
#define TACIT_TEXT(x) TACIT_TEXT_(x)
#define TACIT_BOTH(update) {update<float>, update<Half>}

namespace tacit::TACIT_VARIANT {
extern const RowKernels row_kernels{TACIT_TEXT(TACIT_VARIANT),
                                    TACIT_BOTH(sgd),
                                    TACIT_BOTH(adagrad),
                                    TACIT_BOTH(row_adagrad),
                                    TACIT_BOTH(ftrl),
                                    TACIT_BOTH(lazy_adam),
                                    sums,
                                    exact_sums};
}
