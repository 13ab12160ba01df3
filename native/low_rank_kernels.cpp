// The loops of the lowrank codec. As kernels.cpp: compiled once an instruction set, the same bits from all,
// and nothing from the standard library but types.
//
// Sums are taken in 16 lanes whatever a register holds, in tiles and blocks of fixed sizes; only how many
// rows and columns of a factor share the registers depends on the build, which no sum notices.
#include "low_rank_kernels.h"

#include <cstdint>
#include <cstring>
#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace {

using std::size_t;
using tacit::ErrorMatrix;

#define ALWAYS_INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

// Rows of the matrix and columns of a factor whose sums are in registers together.
#if defined(__AVX512F__)
constexpr size_t width = 16;  // floats in a register
constexpr int left_rows = 2, left_columns = 8, right_columns = 4, finish_rows = 4;
#elif defined(__AVX__)
constexpr size_t width = 8;
constexpr int left_rows = 2, left_columns = 2, right_columns = 2, finish_rows = 1;
#else
constexpr size_t width = 4;
constexpr int left_rows = 2, left_columns = 1, right_columns = 1, finish_rows = 1;
#endif
constexpr size_t lanes = 16, parts = lanes / width;

// The order of additions: columns that `left` adds up in one go, and rows that `right` does, four by four.
constexpr size_t tile = 512, block_rows = 512;
constexpr int right_rows = 4;

// What fits caches: columns of x + e that `right` keeps for all of a factor, its sums, and the packed factors
// of `finish`.
constexpr size_t chunk = 128, most_sums = 8192, most_packed = 1 << 16;
constexpr size_t strip = 2 * lanes;  // columns that `finish` does at once

typedef float Register __attribute__((vector_size(4 * width)));
typedef float LooseRegister __attribute__((vector_size(4 * width), aligned(4), may_alias));
typedef float Quad __attribute__((vector_size(16)));
typedef double DoubleRegister __attribute__((vector_size(4 * width)));
typedef float HalfRegister __attribute__((vector_size(2 * width)));

size_t smaller(size_t a, size_t b) { return a < b ? a : b; }
size_t rounded_up(size_t n, size_t step) { return (n + step - 1) / step * step; }

struct Lanes {
    Register part[parts];
};

template <class Each>
ALWAYS_INLINE Lanes lanewise(Each each) {
    Lanes found;
    UNROLL
    for (size_t i = 0; i < parts; ++i) found.part[i] = each(i);
    return found;
}

ALWAYS_INLINE Lanes operator+(const Lanes& a, const Lanes& b) {
    return lanewise([&](size_t i) { return a.part[i] + b.part[i]; });
}
ALWAYS_INLINE Lanes operator-(const Lanes& a, const Lanes& b) {
    return lanewise([&](size_t i) { return a.part[i] - b.part[i]; });
}
ALWAYS_INLINE Lanes operator*(const Lanes& a, const Lanes& b) {
    return lanewise([&](size_t i) { return a.part[i] * b.part[i]; });
}
// Lanes of `x` that are numbers, and of `other` where they are none.
ALWAYS_INLINE Lanes finite_or(const Lanes& x, const Lanes& other) {
    return lanewise([&](size_t i) {
        const Register zero_or_nan = x.part[i] - x.part[i];
        return zero_or_nan == 0.0f ? x.part[i] : other.part[i];
    });
}
ALWAYS_INLINE Lanes all(float x) {
    return lanewise([&](size_t) { return Register{} + x; });
}
ALWAYS_INLINE Lanes load(const float* from) {
    return lanewise(
        [&](size_t i) -> Register { return *reinterpret_cast<const LooseRegister*>(from + i * width); });
}
ALWAYS_INLINE void store(float* to, const Lanes& v) {
    UNROLL
    for (size_t i = 0; i < parts; ++i) *reinterpret_cast<LooseRegister*>(to + i * width) = v.part[i];
}

// Past the caches, which keep what they have: `to` is aligned to 64 bytes.
ALWAYS_INLINE void stream(float* to, const Lanes& v) {
    UNROLL
    for (size_t i = 0; i < parts; ++i) {
#if defined(__AVX512F__)
        _mm512_stream_ps(to + i * width, __m512(v.part[i]));
#elif defined(__AVX__)
        _mm256_stream_ps(to + i * width, __m256(v.part[i]));
#elif defined(__SSE2__)
        _mm_stream_ps(to + i * width, __m128(v.part[i]));
#else
        *reinterpret_cast<LooseRegister*>(to + i * width) = v.part[i];
#endif
    }
}

ALWAYS_INLINE void streamed() {
#ifdef __SSE2__
    _mm_sfence();  // other threads see what was stored as they see all else
#endif
}

// Memory is slow, and calling for the next rows into the second cache hides that behind sums: hardware does
// not see them coming. Past the end of the matrix this does nothing.
ALWAYS_INLINE void fetch(const ErrorMatrix& m, size_t place) {
    const auto call = [&](const float* from) {  // as a number, which may lie outside the array
        const auto at = reinterpret_cast<std::uintptr_t>(from) + place * sizeof(float);
        __builtin_prefetch(reinterpret_cast<const void*>(at), 0, 2);
    };
    call(m.x);
    call(m.e);
}

// The first `n`, and zeros.
ALWAYS_INLINE Lanes load(const float* from, size_t n) {
    alignas(64) float padded[lanes] = {};
    std::memcpy(padded, from, n * sizeof(float));
    return load(padded);
}

ALWAYS_INLINE float total(const Lanes& v) {
    Quad quads[4];
    std::memcpy(quads, &v, sizeof quads);
    const Quad sum = (quads[0] + quads[2]) + (quads[1] + quads[3]);
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// work(first column, how to load 16 columns from it): the last may be fewer.
template <class Work>
ALWAYS_INLINE void by_lanes(size_t count, Work work) {
    size_t j = 0;
    for (; j + lanes <= count; j += lanes) work(j, [](const float* from) { return load(from); });
    if (j < count) work(j, [&](const float* from) { return load(from, count - j); });
}

template <int n>
struct Count {
    ALWAYS_INLINE constexpr operator int() const { return n; }
};

// work(first column of the factor, how many), at most `most` at a time: as many as there are registers for.
template <int most, class Work>
ALWAYS_INLINE void by_columns_of_factor(size_t rank, Work work, size_t k = 0) {
    for (; k + most <= rank; k += most) work(k, Count<most>());
    if constexpr (most > 1)
        if (k < rank) by_columns_of_factor<most / 2>(rank, work, k);
}

// work(row, how many rows)
template <int most, class Work>
ALWAYS_INLINE void by_rows(size_t begin, size_t end, Work work) {
    size_t i = begin;
    for (; i + most <= end; i += most) work(i, Count<most>());
    for (; i < end; ++i) work(i, Count<1>());
}

// ---- left: a packed q is, by tile, by few columns of the factor, by 16 of the matrix, these columns' lanes:
// what is needed next lies next, whatever the length of a row.

size_t left_floats(size_t rank, size_t columns) { return rank * rounded_up(columns, lanes); }

void pack_left(const float* q, size_t rank, size_t columns, float* packed) {
    for (size_t first = 0; first < columns; first += tile)
        by_columns_of_factor<left_columns>(rank, [&](size_t k, auto few) {
            by_lanes(smaller(tile, columns - first), [&](size_t j, auto load) {
                for (int c = 0; c < few; ++c, packed += lanes)
                    store(packed, load(q + (k + size_t(c)) * columns + first + j));
            });
        });
}

template <int rows, int few>
ALWAYS_INLINE void left_sums(const ErrorMatrix& m, size_t at, size_t count, const float* packed, float* p,
                             bool first, bool fetches) {
    Lanes sums[rows][few] = {};
    by_lanes(count, [&](size_t j, auto load_columns) {
        Lanes v[rows];
        UNROLL
        for (int r = 0; r < rows; ++r) {
            const size_t place = at + size_t(r) * m.columns + j;
            v[r] = load_columns(m.x + place) + load_columns(m.e + place);
            if (fetches) fetch(m, place + size_t(rows) * m.columns);
        }
        UNROLL
        for (int c = 0; c < few; ++c) {
            const Lanes q = load(packed + j * size_t(few) + size_t(c) * lanes);
            UNROLL
            for (int r = 0; r < rows; ++r) sums[r][c] = sums[r][c] + v[r] * q;
        }
    });
    for (int c = 0; c < few; ++c)
        for (int r = 0; r < rows; ++r) {
            float& sum = p[size_t(c) * m.rows + size_t(r)];
            sum = first ? total(sums[r][c]) : sum + total(sums[r][c]);
        }
}

void left(const ErrorMatrix& m, const float* packed, size_t rank, size_t begin, size_t end, float* p) {
    for (size_t first = 0; first < m.columns; first += tile) {
        const size_t count = smaller(tile, m.columns - first), padded = rounded_up(count, lanes);
        by_rows<left_rows>(begin, end, [&](size_t i, auto rows) {
            by_columns_of_factor<left_columns>(rank, [&](size_t k, auto few) {
                left_sums<decltype(rows)() + 0, decltype(few)() + 0>(
                    m, i * m.columns + first, count, packed + k * padded, p + k * m.rows + i, !first, !k);
            });
        });
        packed += rank * padded;
    }
}

// ---- right: the sums of a few hundred columns stay in the cache while rows pass by, four at a time. A chunk
// of these is added up for the first columns of the factor, and kept for the others. The last fetch.

template <int rows, int few>
ALWAYS_INLINE void right_sums(const ErrorMatrix& m, size_t at, size_t count, const float* p, float* sums,
                              float* kept, bool again, bool fetches) {
    Lanes factor[rows][few];
    UNROLL
    for (int c = 0; c < few; ++c) UNROLL
    for (int r = 0; r < rows; ++r) factor[r][c] = all(p[size_t(c) * m.rows + size_t(r)]);
    by_lanes(count, [&](size_t j, auto load_columns) {
        Lanes v[rows];
        UNROLL
        for (int r = 0; r < rows; ++r) {
            const size_t place = at + size_t(r) * m.columns + j;
            if (again) {
                v[r] = load(kept + size_t(r) * chunk + j);
            } else {
                v[r] = load_columns(m.x + place) + load_columns(m.e + place);
                store(kept + size_t(r) * chunk + j, v[r]);
            }
            if (fetches) fetch(m, place + size_t(rows) * m.columns);
        }
        UNROLL
        for (int c = 0; c < few; ++c) {
            float* const sum = sums + j * size_t(few) + size_t(c) * lanes;
            if constexpr (rows == right_rows)
                store(sum, load(sum) + ((v[0] * factor[0][c] + v[1] * factor[1][c]) +
                                        (v[2] * factor[2][c] + v[3] * factor[3][c])));
            else
                store(sum, load(sum) + v[0] * factor[0][c]);
        }
    });
}

// q, or what has been added to it, from the sums of `count` columns.
void add_sums(const float* sums, size_t rank, size_t count, bool first, float* q, size_t columns) {
    const size_t padded = rounded_up(count, lanes);
    by_columns_of_factor<right_columns>(rank, [&](size_t k, auto few) {
        for (int c = 0; c < few; ++c) {
            float* const to = q + (k + size_t(c)) * columns;
            for (size_t j = 0; j < count; j += lanes) {
                const float* const from = sums + k * padded + (j * size_t(few) + size_t(c) * lanes);
                for (size_t i = 0; i < smaller(lanes, count - j); ++i)
                    to[j + i] = first ? from[i] : to[j + i] + from[i];
            }
        }
    });
}

void right(const ErrorMatrix& m, const float* p, size_t rank, size_t begin, size_t end, float* q) {
    alignas(64) float sums[most_sums], kept[right_rows * chunk];
    const size_t most = smaller(512, most_sums / rank / lanes * lanes);
    for (size_t first = begin; first < end; first += most) {
        const size_t count = smaller(most, end - first), padded = rounded_up(count, lanes);
        for (size_t row = 0; row < m.rows; row += block_rows) {
            std::memset(sums, 0, rank * padded * sizeof(float));
            by_rows<right_rows>(row, smaller(row + block_rows, m.rows), [&](size_t i, auto rows) {
                for (size_t j = 0; j < count; j += chunk)
                    by_columns_of_factor<right_columns>(rank, [&](size_t k, auto few) {
                        right_sums<decltype(rows)() + 0, decltype(few)() + 0>(
                            m, i * m.columns + first + j, smaller(chunk, count - j), p + k * m.rows + i,
                            sums + k * padded + j * size_t(few), kept, k, k + right_columns >= rank);
                    });
            });
            add_sums(sums, rank, count, !row, q + first, m.columns);
        }
    }
}

// ---- finish: the packed factors are, by strip of 32 columns, by column of the factor, own's and total's
// lanes.

size_t finish_floats(size_t rank, size_t columns) { return 2 * rank * rounded_up(columns, strip); }

void pack_finish(const float* own, const float* total, size_t rank, size_t columns, float* packed) {
    for (size_t first = 0; first < columns; first += strip) {
        const size_t count = smaller(strip, columns - first);
        for (size_t k = 0; k < rank; ++k)
            for (int which = 0; which < 2; ++which) {
                const float* const from = which ? total : own;
                std::memset(packed, 0, strip * sizeof(float));
                std::memcpy(packed, from + k * columns + first, count * sizeof(float));
                packed += strip;
            }
    }
}

// Where the first of some rows has its strip: `stride` floats from a row to the next.
struct Strip {
    ErrorMatrix m;
    float *error, *out;
    size_t stride;
};

// `p` has the factors of a few rows together.
template <int rows, bool streams>
ALWAYS_INLINE void finish_strip(const Strip& to, const float* p, const float* packed, size_t rank) {
    constexpr int both = strip / lanes;
    Lanes own[rows][both], total[rows][both];
    Lanes v[rows][both];  // before anything is stored: a load waits for a store that lies 4 kB from it
    const auto each = [&](auto work) {
        UNROLL
        for (int r = 0; r < rows; ++r) UNROLL
        for (int c = 0; c < both; ++c) work(r, c, size_t(r) * to.stride + size_t(c) * lanes);
    };
    each([&](int r, int c, size_t at) {
        v[r][c] = load(to.m.x + at) + load(to.m.e + at);
        fetch(to.m, at + size_t(rows) * to.stride);
    });
    const auto add = [&](auto first) {
        UNROLL
        for (int r = 0; r < rows; ++r) {
            const Lanes factor = all(p[r]);
            UNROLL
            for (int c = 0; c < both; ++c) {
                const Lanes a = factor * load(packed + size_t(c) * lanes);
                const Lanes b = factor * load(packed + strip + size_t(c) * lanes);
                own[r][c] = int(first) ? a : own[r][c] + a;
                total[r][c] = int(first) ? b : total[r][c] + b;
            }
        }
    };
    add(Count<1>());
    for (size_t k = 1; k < rank; ++k) {
        p += rows, packed += 2 * strip;
        add(Count<0>());
    }
    each([&](int r, int c, size_t at) {
        store(to.error + at, finite_or(v[r][c] - own[r][c], load(to.m.e + at)));
        streams ? stream(to.out + at, total[r][c]) : store(to.out + at, total[r][c]);
    });
}

// The last strip of a row, done where there is room.
template <int rows>
void finish_rest(const Strip& to, size_t count, const float* p, const float* packed, size_t rank) {
    alignas(64) float x[rows * strip] = {}, e[rows * strip] = {}, out[rows * strip];
    const auto each = [&](auto copy) {
        for (size_t r = 0; r < size_t(rows); ++r) copy(r * to.stride, r * strip, count * sizeof(float));
    };
    each([&](size_t there, size_t here, size_t nbytes) {
        std::memcpy(x + here, to.m.x + there, nbytes);
        std::memcpy(e + here, to.m.e + there, nbytes);
    });
    finish_strip<rows, false>({{x, e, rows, strip}, e, out, strip}, p, packed, rank);
    each([&](size_t there, size_t here, size_t nbytes) {
        std::memcpy(to.error + there, e + here, nbytes);
        std::memcpy(to.out + there, out + here, nbytes);
    });
}

template <bool streams>
void finish(const ErrorMatrix& m, const float* p, const float* packed, size_t rank, size_t begin, size_t end,
            float* error, float* out) {
    const size_t strips = most_packed / (2 * strip * rank) + 1;  // at once
    for (size_t first = 0; first < m.columns; first += strips * strip) {
        const size_t last = smaller(first + strips * strip, m.columns);
        by_rows<finish_rows>(begin, end, [&](size_t i, auto count) {
            constexpr int rows = decltype(count)();
            alignas(64) float factors[tacit::most_rank * rows];
            for (size_t k = 0; k < rank; ++k)
                for (size_t r = 0; r < rows; ++r) factors[k * rows + r] = p[k * m.rows + i + r];
            for (size_t j = first; j < last; j += strip) {
                const size_t at = i * m.columns + j;
                const Strip to{{m.x + at, m.e + at, m.rows, m.columns}, error + at, out + at, m.columns};
                if (j + strip <= last)
                    finish_strip<rows, streams>(to, factors, packed + 2 * rank * j, rank);
                else
                    finish_rest<rows>(to, last - j, factors, packed + 2 * rank * j, rank);
            }
        });
    }
    if (streams) streamed();
}

// ---- orthonormalize

template <bool reduces, bool squares>
double project(double* v, const float* off, double factor, const float* with, size_t length) {
    constexpr size_t doubles = width / 2, count = lanes / doubles;  // a register
    const auto widened = [](const float* from, size_t i) {
        HalfRegister half;
        std::memcpy(&half, from + i * doubles, sizeof half);
        return __builtin_convertvector(half, DoubleRegister);
    };
    DoubleRegister sums[count] = {};
    const auto step = [&](size_t j, const float* off_at, const float* with_at) {
        UNROLL
        for (size_t i = 0; i < count; ++i) {
            DoubleRegister now;
            std::memcpy(&now, v + j + i * doubles, sizeof now);
            if (reduces) {
                now -= factor * widened(off_at, i);
                std::memcpy(v + j + i * doubles, &now, sizeof now);
            }
            sums[i] += now * (squares ? now : widened(with_at, i));
        }
    };
    size_t j = 0;
    for (; j + lanes <= length; j += lanes) step(j, reduces ? off + j : off, squares ? with : with + j);
    if (j < length) {
        float off_rest[lanes] = {}, with_rest[lanes] = {};
        if (reduces) std::memcpy(off_rest, off + j, (length - j) * sizeof(float));
        if (!squares) std::memcpy(with_rest, with + j, (length - j) * sizeof(float));
        step(j, off_rest, with_rest);
    }
    double each[lanes];
    std::memcpy(each, sums, sizeof each);
    for (size_t half = lanes / 2; half; half /= 2)
        for (size_t i = 0; i < half; ++i) each[i] += each[i + half];
    return each[0];
}

double project(double* v, const float* off, double factor, const float* with, size_t length) {
    if (off)
        return with ? project<true, false>(v, off, factor, with, length)
                    : project<true, true>(v, off, factor, with, length);
    return with ? project<false, false>(v, off, factor, with, length)
                : project<false, true>(v, off, factor, with, length);
}

}  // namespace

#define TACIT_TEXT_(x) #x
#define TACIT_TEXT(x) TACIT_TEXT_(x)

namespace tacit::TACIT_VARIANT {
extern const LowRankKernels low_rank_kernels{TACIT_TEXT(TACIT_VARIANT),
                                             left_floats,
                                             pack_left,
                                             left,
                                             right,
                                             finish_floats,
                                             pack_finish,
                                             finish<false>,
                                             finish<true>,
                                             project};
}
