// The loops over elements of the sparse codecs. As kernels.cpp: compiled once an instruction set, the same
// bits from all, and nothing from the standard library but types.
#include "sparse_kernels.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

using std::int32_t;
using std::size_t;
using std::uint32_t;

constexpr int32_t magnitude_mask = 0x7fffffff;
constexpr size_t chunk = 4096;  // counts of one fit any lane

inline int32_t magnitude(float x) { return int32_t(__builtin_bit_cast(uint32_t, x)) & magnitude_mask; }

size_t count(const float* x, size_t numel, int32_t least) {
    size_t found = 0;
    for (size_t start = 0; start < numel; start += chunk) {
        const size_t stop = start + chunk < numel ? start + chunk : numel;
        int32_t here = 0;
        for (size_t i = start; i < stop; ++i) here += magnitude(x[i]) >= least;
        found += size_t(here);
    }
    return found;
}

size_t compact(const float* x, size_t numel, uint32_t first, int32_t least, uint32_t* room) {
    size_t found = 0, i = 0;
#if defined(__AVX512F__)
    const __m512i bits = _mm512_set1_epi32(magnitude_mask), limit = _mm512_set1_epi32(least);
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (; i + 16 <= numel; i += 16) {
        const __m512i size = _mm512_and_si512(_mm512_loadu_si512(x + i), bits);
        const __mmask16 large = _mm512_cmpge_epi32_mask(size, limit);
        if (!large) continue;
        const __m512i places = _mm512_add_epi32(lanes, _mm512_set1_epi32(int32_t(first + uint32_t(i))));
        _mm512_storeu_si512(room + found, _mm512_maskz_compress_epi32(large, places));
        found += size_t(__builtin_popcount(large));
    }
#elif defined(__AVX2__)
    const __m256i bits = _mm256_set1_epi32(magnitude_mask), below = _mm256_set1_epi32(least - 1);
    const auto large_of = [&](const float* at) {
        const __m256i size = _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)), bits);
        return uint32_t(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(size, below))));
    };
    for (; i + 16 <= numel; i += 16)
        for (uint32_t large = large_of(x + i) | large_of(x + i + 8) << 8; large; large &= large - 1)
            room[found++] = first + uint32_t(i) + uint32_t(__builtin_ctz(large));
#else
    for (; i + 16 <= numel; i += 16) {
        int32_t any = 0;
        for (size_t k = 0; k < 16; ++k) any |= -int32_t(magnitude(x[i + k]) >= least);
        if (!any) continue;
        for (size_t k = i; k < i + 16; ++k) {
            room[found] = first + uint32_t(k);
            found += magnitude(x[k]) >= least;
        }
    }
#endif
    for (; i < numel; ++i) {
        room[found] = first + uint32_t(i);
        found += magnitude(x[i]) >= least;
    }
    return found;
}

void used(const float* x, size_t numel, size_t block, std::uint8_t* out) {
    for (size_t start = 0; start < numel; start += block) {
        const size_t stop = start + block < numel ? start + block : numel;
        int32_t any = 0;
        for (size_t i = start; i < stop; ++i) any |= magnitude(x[i]);
        *out++ = any != 0;
    }
}

void accumulate(const float* __restrict x, size_t numel, float momentum, float* __restrict u,
                float* __restrict v, float* __restrict wanted) {
    for (size_t i = 0; i < numel; ++i) {
        const float velocity = momentum * u[i] + x[i], all = v[i] + velocity;
        wanted[i] = all;
        const bool finite = all - all == 0;
        u[i] = finite ? velocity : u[i];
        v[i] = finite ? all : v[i];
    }
}

}  // namespace

#define TACIT_TEXT_(x) #x
#define TACIT_TEXT(x) TACIT_TEXT_(x)

namespace tacit::TACIT_VARIANT {
extern const SparseKernels sparse_kernels{TACIT_TEXT(TACIT_VARIANT), count, compact, used, accumulate};
}
