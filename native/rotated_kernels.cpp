// The loops of the two rotating codecs, hush and thc. As kernels.cpp: compiled once an instruction set, the
// same bits from all, and nothing from the standard library but types.
//
// A Row is 8 floats in the compiler's vector type: one register on AVX, two on SSE2, and no intrinsics needed
// to rotate. Only looking up tables is written twice, with AVX2 shuffles and plainly.
#include "rotated_kernels.h"

#include <cstring>

#include "stream.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

using std::int32_t;
using std::size_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;
using namespace tacit;

typedef float Row __attribute__((vector_size(32)));
typedef float LooseRow __attribute__((vector_size(32), aligned(4), may_alias));  // anywhere in memory
typedef uint32_t Words __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));

#define ALWAYS_INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

ALWAYS_INLINE Row load(const float* from) { return *reinterpret_cast<const LooseRow*>(from); }
ALWAYS_INLINE void store(float* to, Row row) { *reinterpret_cast<LooseRow*>(to) = row; }
ALWAYS_INLINE Row all(float x) { return Row{} + x; }
ALWAYS_INLINE Words all(uint32_t x) { return Words{} + x; }

// Bit c of a row's sign byte flips lane c; the bytes of four rows make a word. `at` is the row's place in it.
ALWAYS_INLINE Row flip(Row row, uint32_t word, int at) {
    const Words up = all(uint32_t(31 - 8 * at)) - Words{0, 1, 2, 3, 4, 5, 6, 7};
    return Row((all(word) << up & 0x80000000u) ^ Words(row));
}

// Nibble c of a row's dither word, in lane c; what lies above it is left in place.
ALWAYS_INLINE Words nibbles(uint32_t word) { return all(word) >> Words{0, 4, 8, 12, 16, 20, 24, 28}; }

// Fills `words` with the random words from `first` on.
ALWAYS_INLINE void draw(uint64_t seed, uint64_t first, size_t n, uint32_t* __restrict words) {
    const Stream random(seed, first);
    const uint32_t count = uint32_t(n);  // k < n with a 64-bit n would not vectorise: k might wrap
    for (uint32_t k = 0; k < count; ++k) words[k] = random(k);
}

// Unnormalised Walsh-Hadamard over v[0..radix), with v[k] = from(k): low strides first. Depth first, so that
// sixteen rows all but fit in sixteen registers.
template <int radix, class From>
ALWAYS_INLINE void rotate(Row* v, From from, int first = 0) {
    if constexpr (radix == 1) {
        v[0] = from(first);
    } else {
        constexpr int h = radix / 2;
        rotate<h>(v, from, first);
        rotate<h>(v + h, from, first + h);
        UNROLL
        for (int k = 0; k < h; ++k) {
            const Row a = v[k], b = v[k + h];
            v[k] = a + b;
            v[k + h] = a - b;
        }
    }
}

// The stages h, 2h, ... radix/2 * h over `rows` rows, in place.
template <int radix>
void pass(Row* rows, size_t n, size_t h) {
    for (size_t i = 0; i < n; i += radix * h)
        for (size_t j = i; j < i + h; ++j) {
            Row v[radix];
            rotate<radix>(v, [&](int k) { return rows[j + size_t(k) * h]; });
            UNROLL
            for (int k = 0; k < radix; ++k) rows[j + size_t(k) * h] = v[k];
        }
}

void pass(Row* rows, size_t n, size_t h, size_t radix) {
    if (radix == 2) pass<2>(rows, n, h);
    if (radix == 4) pass<4>(rows, n, h);
    if (radix == 8) pass<8>(rows, n, h);
    if (radix == 16) pass<16>(rows, n, h);
}

// Calls for the 256 bytes at `soon`, where there is a `soon`: memory is slow, and this hides it behind sums.
template <bool to_write>
ALWAYS_INLINE void fetch(const float* soon) {
    if (!soon) return;
    UNROLL
    for (size_t i = 0; i < 64; i += 16) __builtin_prefetch(soon + i, to_write, to_write ? 2 : 3);
}

// ---- hush: a piece is 64 to 1024 rows; lane c of all its rows is block c.
// The pieces of a group lie side by side, rows far apart, so a group is read (or written) row by row, as wide
// as it is, and each piece rotates in a tile of its own. Encoding: stages 1 and 2 as four rows are read, the
// middle in the tile, the last three or four as indices are packed. Decoding: sixteen rows as lanes are read
// (stages 1..8), each quarter while it is warm, and at last across the four quarters, as rows are written.

template <size_t n>
struct Fixed {
    ALWAYS_INLINE constexpr operator size_t() const { return n; }
};

template <class Float>
ALWAYS_INLINE Float* row(const HushStrip<Float>& strip, size_t k) {
    return strip.base + strip.starts[k / hush_run_rows] + k % hush_run_rows * strip.stride;
}

constexpr size_t most_norms = 32;  // pieces: their sums take 2 KB

// sum[s] += the squares of piece s in a row of each of four runs; added up among themselves first, lest each
// wait for the last.
template <class Count>
ALWAYS_INLINE void add_squares(const float* const* at, size_t from, Count n, Row* sum) {
    const auto square = [&](size_t run, size_t s) {
        const Row v = load(at[run] + from + s * hush_lanes);
        return v * v;
    };
    for (size_t s = 0; s < n; ++s) sum[s] += (square(0, s) + square(1, s)) + (square(2, s) + square(3, s));
}

// Memory is quickest when it is read in a few runs at once that lie some pages apart, and when it is not
// called for beforehand: a group's part of a row of each of four runs in turn. A sum takes 64 rows, so that
// there are few roundings in a row.
template <class Count>
ALWAYS_INLINE void norms_of(const HushStrip<const float>& strip, Count n, float* norms) {
    constexpr size_t steps = 16, far = 1 << 14;  // rows, floats
    const size_t stride = strip.stride, rows = strip.rows;
    size_t run = rows / 4;
    while (run > steps && run * stride > far) run /= 2;
    Row total[most_norms], sum[most_norms];
    for (size_t s = 0; s < n; ++s) total[s] = Row{};
    for (size_t first = 0; first < rows; first += 4 * run) {
        for (size_t k = first; k < first + run; k += steps) {
            const float* const at[] = {row(strip, k), row(strip, k + run), row(strip, k + 2 * run),
                                       row(strip, k + 3 * run)};
            for (size_t s = 0; s < n; ++s) sum[s] = Row{};
            for (size_t i = 0; i < steps * stride; i += stride) {
                size_t s = 0;
                for (; s + hush_group <= n; s += hush_group)
                    add_squares(at, i + s * hush_lanes, Fixed<hush_group>(), sum + s);
                for (; s < n; ++s) add_squares(at, i + s * hush_lanes, Fixed<1>(), sum + s);
            }
            for (size_t s = 0; s < n; ++s) total[s] += sum[s];
        }
    }
    for (size_t s = 0; s < n; ++s)
        for (size_t c = 0; c < hush_lanes; ++c) norms[s * hush_lanes + c] = __builtin_sqrtf(total[s][c]);
}

void hush_norms(const HushStrip<const float>& strip, float* norms) {
    if (strip.count == 1)
        norms_of(strip, Fixed<1>(), norms);
    else
        norms_of(strip, strip.count, norms);
}

typedef uint32_t Signs[hush_group][hush_piece_rows / 4];

ALWAYS_INLINE Row* rows_of(float* tile) { return reinterpret_cast<Row*>(tile); }

// work(how many pieces, their signs), with the usual counts known to the compiler.
template <class Float, class Work>
ALWAYS_INLINE void with_strip(const HushStrip<Float>& strip, uint64_t seed, Work work) {
    alignas(64) Signs signs;
    for (size_t s = 0; s < strip.count; ++s)
        draw(seed, (strip.first_row + s * strip.rows) / 4, strip.rows / 4, signs[s]);
    if (strip.count == hush_group)
        work(Fixed<hush_group>(), signs);
    else if (strip.count == 1)
        work(Fixed<1>(), signs);
    else
        work(strip.count, signs);
}

void hush_gather(const HushStrip<const float>& strip, uint64_t sign_seed, float* tiles) {
    const size_t stride = strip.stride;
    with_strip(strip, sign_seed, [&](auto count, const Signs& signs) {
        for (size_t k = 0; k < strip.rows; k += 4) {
            const float* at = row(strip, k);
            if (count > 1 && k + 8 < strip.rows) {  // hardware cannot see these rows coming
                const float* soon = row(strip, k + 8);
                for (size_t i = 0; i < 4; ++i)
                    for (size_t s = 0; s < count; s += 2)
                        __builtin_prefetch(soon + i * stride + s * hush_lanes);
            }
            for (size_t s = 0; s < count; ++s) {
                Row v[4];
                rotate<4>(v, [&](int i) {
                    return flip(load(at + size_t(i) * stride + s * hush_lanes), signs[s][k / 4], i);
                });
                UNROLL
                for (size_t i = 0; i < 4; ++i) rows_of(tiles + s * hush_tile)[k + i] = v[i];
            }
        }
    });
}

// Eight rotated rows as 32 bytes of indices. Twice the dithered value is what picks the cell: doubling is
// exact, so it is done to the constants. A NaN (of a block that is not finite) picks cell 0.
struct Cells {
    Row scale, step, offset, top;
#ifdef __AVX2__
    __m256i first, delta[3];  // cell[0..16), and what to xor for each 16 cells further

    static __m256i sixteen(const uint8_t* a, const uint8_t* b) {
        const auto half = [](const uint8_t* p) {
            return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        };
        return _mm256_broadcastsi128_si256(b ? _mm_xor_si128(half(a), half(b)) : half(a));
    }
#else
    const uint8_t* cell;
#endif

    Cells(const HushEncoding& how, const float* norms)
        : step(all(2.0f * how.alpha_step)),
          offset(all(2.0f * how.offset)),
          top(all(float(2 * how.granularity))) {
        for (size_t c = 0; c < hush_lanes; ++c) {
            const bool usable = norms[c] > 0.0f && norms[c] <= __FLT_MAX__;
            scale[c] = usable ? 2.0f * (how.half_scale / norms[c]) : 0.0f;
        }
#ifdef __AVX2__
        first = sixteen(how.cell, nullptr);
        for (int k = 0; k < 3; ++k) delta[k] = sixteen(how.cell + 16 * k, how.cell + 16 * (k + 1));
#else
        cell = how.cell;
#endif
    }

    ALWAYS_INLINE Row dithered(Row y, uint32_t word) const {
        return y * scale + (step * __builtin_convertvector(Ints(nibbles(word) & 15), Row) + offset);
    }

#ifdef __AVX2__
    ALWAYS_INLINE void pack(const Row* y, const uint32_t* words, uint8_t* out) const {
        __m256i pairs[2];  // a 16-bit word for two elements: lanes 0..3 of four rows, then their lanes 4..7
        UNROLL
        for (int half = 0; half < 2; ++half) {
            __m256i w[4];
            UNROLL
            for (int k = 0; k < 4; ++k)  // min gives its second if either is NaN, which converts to INT_MIN
                w[k] =
                    _mm256_cvttps_epi32(_mm256_min_ps(top, dithered(y[4 * half + k], words[4 * half + k])));
            const __m256i bytes =  // saturating: what is below 0 becomes 0
                _mm256_packus_epi16(_mm256_packs_epi32(w[0], w[1]), _mm256_packs_epi32(w[2], w[3]));
            __m256i index = _mm256_shuffle_epi8(first, bytes);
            UNROLL
            for (int k = 0; k < 3; ++k) {  // shuffle gives 0 for a negative byte
                const __m256i beyond = _mm256_sub_epi8(bytes, _mm256_set1_epi8(char(16 * (k + 1))));
                index = _mm256_xor_si256(index, _mm256_shuffle_epi8(delta[k], beyond));
            }
            pairs[half] = _mm256_maddubs_epi16(index, _mm256_set1_epi16(0x1001));
        }
        const __m256i bytes = _mm256_packus_epi16(pairs[0], pairs[1]);
        const __m128i low = _mm256_castsi256_si128(bytes), high = _mm256_extracti128_si256(bytes, 1);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_unpacklo_epi16(low, high));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 16), _mm_unpackhi_epi16(low, high));
    }
#else
    ALWAYS_INLINE void pack(const Row* y, const uint32_t* words, uint8_t* out) const {
        for (int k = 0; k < 8; ++k) {
            Row v = dithered(y[k], words[k]);
            v = v > 0.0f ? v : Row{};
            v = v < top ? v : top;
            const Ints w = __builtin_convertvector(v, Ints);
            for (int c = 0; c < 8; c += 2) *out++ = uint8_t(cell[w[c]] | cell[w[c + 1]] << 4);
        }
    }
#endif
};

// The last stages, and out.
template <int radix>
ALWAYS_INLINE void pack_rotated(const Row* piece, size_t rows, const Cells& cells, const uint32_t* dither,
                                const float* next, uint8_t* out) {
    const size_t h = rows / radix;
    for (size_t j = 0; j < h; j += 8) {
        Row y[radix][8];
        for (size_t k = 0; k < 8; ++k) {
            Row v[radix];
            rotate<radix>(v, [&](int q) { return piece[j + k + size_t(q) * h]; });
            UNROLL
            for (int q = 0; q < radix; ++q) y[q][k] = v[q];
        }
        for (size_t q = 0; q < radix; ++q) {
            fetch<false>(next ? next + (radix * j + 8 * q) * hush_lanes : nullptr);
            cells.pack(y[q], dither + q * h + j, out + (q * h + j) * hush_lanes / 2);
        }
    }
}

void hush_encode(float* tile, size_t first_row, size_t rows, const float* norms, const HushEncoding& how,
                 const float* next, uint8_t* out) {
    alignas(64) uint32_t dither[hush_piece_rows];
    draw(how.dither_seed, first_row, rows, dither);
    const uint32_t place = how.place * 0x11111111u;
    for (size_t k = 0; k < rows; ++k)  // adds `place` to each nibble, without a carry into the next
        dither[k] = ((dither[k] & 0x77777777u) + (place & 0x77777777u)) ^ ((dither[k] ^ place) & 0x88888888u);
    const Cells cells(how, norms);
    const size_t last = rows == 64 ? 8 : 16;  // its stride must not be below the eight rows packed together
    pass(rows_of(tile), rows, 4, rows / 4 / last);
    if (last == 8)
        pack_rotated<8>(rows_of(tile), rows, cells, dither, next, out);
    else
        pack_rotated<16>(rows_of(tile), rows, cells, dither, next, out);
}

// offsets[nibble] in each lane.
struct Offsets {
#ifdef __AVX2__
    Row low, high;
    explicit Offsets(const float* offsets) : low(load(offsets)), high(load(offsets + 8)) {}
    ALWAYS_INLINE Row operator()(uint32_t word) const {
        const __m256i at = __m256i(nibbles(word));
        return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, at), _mm256_permutevar8x32_ps(high, at),
                                _mm256_castsi256_ps(_mm256_slli_epi32(at, 28)));
    }
#else
    const float* offsets;
    explicit Offsets(const float* offsets) : offsets(offsets) {}
    ALWAYS_INLINE Row operator()(uint32_t word) const {
        Row row;
        for (int c = 0; c < 8; ++c) row[c] = offsets[word >> 4 * c & 15];
        return row;
    }
#endif
};

// Eight lanes as floats.
template <class Lane>
ALWAYS_INLINE Row floats(const Lane* lanes) {
#ifdef __AVX2__  // the conversion below is all scalar in GCC 12
    if constexpr (sizeof(Lane) == 1)
        return _mm256_cvtepi32_ps(
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(lanes))));
    else if constexpr (sizeof(Lane) == 2)
        return _mm256_cvtepi32_ps(
            _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(lanes))));
#endif
    typedef Lane Narrow __attribute__((vector_size(8 * sizeof(Lane))));
    Narrow narrow;
    std::memcpy(&narrow, lanes, sizeof narrow);
    return __builtin_convertvector(__builtin_convertvector(narrow, Ints), Row);
}

template <class Lane>
void hush_decode(const Lane* lanes, size_t first_row, size_t rows, const float* norms,
                 const HushDecoding& how, const float* next, float* tile) {
    alignas(64) uint32_t dither[hush_piece_rows];
    draw(how.dither_seed, first_row, rows, dither);
    Row scale;
    for (size_t c = 0; c < hush_lanes; ++c) {
        const bool finite = norms[c] <= __FLT_MAX__;
        scale[c] = finite ? how.unit * norms[c] * (1.0f / float(rows)) * how.gain : __builtin_nanf("");
    }
    const Offsets offsets(how.offsets);
    Row* piece = rows_of(tile);
    const size_t quarter = rows / 4;
    for (size_t start = 0; start < rows; start += quarter) {
        for (size_t i = start; i < start + quarter; i += 16) {
            for (size_t k = 0; k < 16; k += 8) fetch<true>(next ? next + (i + k) * hush_lanes : nullptr);
            Row v[16];
            rotate<16>(v, [&](int k) {
                const size_t row = i + size_t(k);
                return (floats(lanes + row * hush_lanes) + offsets(dither[row])) * scale;
            });
            UNROLL
            for (int k = 0; k < 16; ++k) piece[i + size_t(k)] = v[k];
        }
        pass(piece + start, quarter, 16, quarter / 16);
    }
}

void hush_scatter(float* tiles, const HushStrip<float>& strip, uint64_t sign_seed) {
    const size_t quarter = strip.rows / 4, stride = strip.stride;
    with_strip(strip, sign_seed, [&](auto count, const Signs& signs) {
        for (size_t j = 0; j < quarter; j += 4) {
            float* const to[] = {row(strip, j), row(strip, j + quarter), row(strip, j + 2 * quarter),
                                 row(strip, j + 3 * quarter)};
            UNROLL
            for (size_t k = 0; k < 4; ++k) {
                if (count > 1)
                    for (size_t q = 0; q < 4; ++q)
                        for (size_t s = 0; s < count; s += 2)
                            __builtin_prefetch(to[q] + (k + 2) * stride + s * hush_lanes, 1);
                for (size_t s = 0; s < count; ++s) {
                    const Row* from = rows_of(tiles + s * hush_tile) + j + k;
                    Row v[4];
                    rotate<4>(v, [&](int q) { return from[size_t(q) * quarter]; });
                    UNROLL
                    for (size_t q = 0; q < 4; ++q)
                        store(to[q] + k * stride + s * hush_lanes,
                              flip(v[q], signs[s][(j + q * quarter) / 4], int(k)));
                }
            }
        }
    });
}

// ---- The adder: two 4-bit indices a byte, the even element in the low nibble.

constexpr size_t tile =
    512;  // elements worked on at a time: even, and small enough to stay in the first cache

// values[k] = table[index k], for `n` elements; writes up to the next multiple of 64.
ALWAYS_INLINE void look_up(const uint8_t* index, size_t n, const uint8_t* table, uint8_t* values) {
    size_t k = 0;
#ifdef __AVX2__
    const __m256i entries =
        _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    const __m256i low = _mm256_set1_epi8(15);
    for (; k + 64 <= n; k += 64) {
        const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(index + k / 2));
        const __m256i even = _mm256_shuffle_epi8(entries, _mm256_and_si256(bytes, low));
        const __m256i odd = _mm256_shuffle_epi8(entries, _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low));
        const __m256i a = _mm256_unpacklo_epi8(even, odd), b = _mm256_unpackhi_epi8(even, odd);
        __m256i* to = reinterpret_cast<__m256i*>(values + k);
        _mm256_storeu_si256(to, _mm256_permute2x128_si256(a, b, 0x20));
        _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(a, b, 0x31));
    }
#endif
    for (; k + 2 <= n; k += 2) {
        values[k] = table[index[k / 2] & 15];
        values[k + 1] = table[index[k / 2] >> 4];
    }
    if (k < n) values[k] = table[index[k / 2] & 15];
}

template <class Lane>
constexpr Lane most = Lane(Lane(-1) > 0 ? uint32_t(Lane(-1)) : 0x7fffffffu);

template <class Lane>
size_t add_table(const uint8_t* index, size_t numel, const uint8_t* table, Lane* __restrict lanes) {
    constexpr size_t ahead = 4096 / sizeof(Lane);
    size_t saturated = 0;
    for (size_t i = 0, n; i < numel; i += n) {
        n = numel - i < tile ? numel - i : tile;
        for (size_t k = 0; k < tile; k += 64 / sizeof(Lane)) __builtin_prefetch(lanes + i + k + ahead, 1);
        for (size_t k = 0; k < tile / 2; k += 64) __builtin_prefetch(index + i / 2 + k + ahead / 2);
        alignas(64) uint8_t values[tile];
        look_up(index + i / 2, n, table, values);
        Lane* __restrict to = lanes + i;
        Lane over = 0;
        for (size_t k = 0; k < n; ++k) over |= Lane(to[k] > Lane(most<Lane> - values[k]));
        if (over)  // rare: lanes are chosen wide enough for the ranks
            for (size_t k = 0; k < n; ++k) saturated += to[k] > Lane(most<Lane> - values[k]);
        for (size_t k = 0; k < n; ++k) {
            const Lane room = Lane(most<Lane> - to[k] < values[k] ? most<Lane> - to[k] : values[k]);
            to[k] = Lane(to[k] + room);
        }
    }
    return saturated;
}

template <class Lane>
void lookup_table(const uint8_t* index, size_t numel, const uint8_t* table, Lane* __restrict lanes) {
    for (size_t i = 0, n; i < numel; i += n) {
        n = numel - i < tile ? numel - i : tile;
        alignas(64) uint8_t values[tile];
        look_up(index + i / 2, n, table, values);
        for (size_t k = 0; k < n; ++k) lanes[i + k] = values[k];
    }
}

// ---- thc: a block is 2^3 to 2^20 elements that lie together.

// The stages 1, 2 and 4, inside a row. b + (-a) is b - a to the bit.
ALWAYS_INLINE Row rotate_within(Row v) {
    constexpr uint32_t minus = 0x80000000u;
    v = __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6) +
        Row(Words(v) ^ Words{0, minus, 0, minus, 0, minus, 0, minus});
    v = __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5) +
        Row(Words(v) ^ Words{0, 0, minus, minus, 0, 0, minus, minus});
    return __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3) +
           Row(Words(v) ^ Words{0, 0, 0, 0, minus, minus, minus, minus});
}

// The stages from 1 row to half of `n` rows: first where the first cache holds them, then across.
void rotate_rows(Row* rows, size_t n) {
    const auto passes = [](Row* at, size_t span, size_t h) {
        for (size_t radix; h < span; h *= radix) {
            radix = span / h < 16 ? span / h : 16;
            pass(at, span, h, radix);
        }
    };
    const size_t warm = n < hush_piece_rows ? n : hush_piece_rows;
    for (size_t i = 0; i < n; i += warm) passes(rows + i, warm, 1);
    passes(rows, n, warm);
}

// change(row, flipped by the signs of its elements) for each row of a block that starts at element `first`.
template <class Change>
ALWAYS_INLINE void with_signs(uint64_t seed, size_t first, Row* rows, size_t n, Change change) {
    for (size_t i = 0; i < n; i += hush_piece_rows) {
        uint32_t signs[hush_piece_rows / 4];
        const size_t row = first / 8 + i, some = n - i < hush_piece_rows ? n - i : hush_piece_rows;
        draw(seed, row / 4, (some + 3) / 4, signs);  // a block starts at a multiple of its length
        for (size_t k = 0; k < some; ++k) {
            const size_t at = row % 4 + k;
            rows[i + k] = change(flip(rows[i + k], signs[at / 4], int(at % 4)));
        }
    }
}

void pack_indices(const uint8_t* index, size_t n, int bits, uint8_t* out) {
    if (bits == 2)
        for (size_t k = 0; k < n; k += 4)
            *out++ = uint8_t(index[k] | index[k + 1] << 2 | index[k + 2] << 4 | index[k + 3] << 6);
    else
        for (size_t k = 0; k < n; k += 2) *out++ = uint8_t(index[k] | index[k + 1] << 4);
}

void thc_encode(float* block, size_t first, size_t length, float factor, const ThcEncoding& how,
                uint8_t* out) {
    Row* rows = reinterpret_cast<Row*>(block);
    with_signs(how.sign_seed, first, rows, length / 8, [](Row v) { return rotate_within(v); });
    rotate_rows(rows, length / 8);
    for (size_t i = 0, n; i < length; i += n) {
        n = length - i < tile ? length - i : tile;
        const Stream random(how.round_seed, first + i);
        float v[tile], u[tile];
        for (uint32_t k = 0; k < uint32_t(n); ++k) {
            float z = block[i + k] * factor;
            z = z > -how.t_p ? z : -how.t_p;  // so is a NaN
            z = z < how.t_p ? z : how.t_p;
            v[k] = (z + how.t_p) * how.scale;
            u[k] = float(int32_t(random(k) >> 8)) * 0x1p-24f;
        }
        uint8_t index[tile];
        for (size_t k = 0; k < n; ++k) {
            const int32_t floor = int32_t(v[k]);
            const ThcCell& cell = how.cells[floor < how.last_cell ? floor : how.last_cell];
            index[k] = uint8_t(cell.lower + (v[k] - cell.base > u[k] * cell.width));
        }
        pack_indices(index, n, how.bits, out);
        out += n * (how.bits == 2 ? 2 : 4) / 8;
    }
}

template <class Lane>
void thc_decode(const Lane* lanes, size_t first, size_t length, float factor, const ThcDecoding& how,
                float* block) {
    Row* rows = reinterpret_cast<Row*>(block);
    for (size_t i = 0; i < length / 8; ++i)
        rows[i] = rotate_within((floats(lanes + 8 * i) * how.unit - how.half) * factor);
    rotate_rows(rows, length / 8);
    with_signs(how.sign_seed, first, rows, length / 8, [&](Row v) { return v * how.gain; });
}

}  // namespace

#define TACIT_TEXT_(x) #x
#define TACIT_TEXT(x) TACIT_TEXT_(x)
#define TACIT_LANES(Lane) {hush_decode<Lane>, thc_decode<Lane>, add_table<Lane>, lookup_table<Lane>}

namespace tacit::TACIT_VARIANT {
extern const RotatedKernels rotated_kernels{TACIT_TEXT(TACIT_VARIANT),
                                            hush_norms,
                                            hush_gather,
                                            hush_encode,
                                            hush_scatter,
                                            thc_encode,
                                            TACIT_LANES(uint8_t),
                                            TACIT_LANES(uint16_t),
                                            TACIT_LANES(int32_t)};
}
