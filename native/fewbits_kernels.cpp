// The loops over elements of few bits. As kernels.cpp: compiled once an instruction set, the same bits from
// all, and nothing from the standard library but types. A tile of codes is a byte an element in the first
// cache; it is squeezed into bits, or spread out of them, eight elements a 64-bit word.
#include "fewbits_kernels.h"

#include <cstring>

#include "stream.h"

namespace {

using std::int32_t;
using std::int8_t;
using std::size_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;

constexpr size_t tile = 512;  // a multiple of lanes and of 8
constexpr size_t lanes = 16;  // partial sums, added in this order by all builds
constexpr uint32_t infinity_bits = 0x7f800000u;
constexpr float smallest_unit = 0x1p-120f;  // keeps 1 / unit far from overflow; blocks below are zero
constexpr float largest = 0x1.fffffep127f;
constexpr int fitting = 4;  // Lloyd's steps, the first from 1.3 times the mean

size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

// How many of the `n` elements from `first` on to do at once: no tile crosses a multiple of 2^32.
size_t tile_at(uint64_t first, size_t n) {
    return smaller(smaller(tile, n), (uint64_t(1) << 32) - uint32_t(first));
}

uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }
float quiet_nan() { return float_of(0x7fc00000u); }
float uniform(uint32_t word) { return float(int32_t(word >> 8)) * 0x1p-24f; }

// As in kernels.cpp: NaN > infinity > finite.
uint32_t absmax_bits(const float* x, size_t n) {
    int32_t most = 0;
    for (size_t k = 0; k < n; ++k) {
        const int32_t bits = int32_t(bits_of(x[k]) & 0x7fffffffu);
        most = bits > most ? bits : most;
    }
    return uint32_t(most);
}

double plain(float x) { return double(x); }
double absolute(float x) { return double(float_of(bits_of(x) & 0x7fffffffu)); }
double square(float x) { return double(x) * double(x); }
// By masks: a branch on the sign of a gradient is a coin's.
uint32_t negative(float x) { return uint32_t(int32_t(bits_of(x)) >> 31); }
double below(float x) { return double(float_of(bits_of(x) & negative(x))); }
double above(float x) { return double(float_of(bits_of(x) & ~negative(x))); }

template <class Of>
double sum_by(const float* x, size_t n, Of of) {
    double total = 0;
    for (size_t i = 0; i < n; i += tile) {
        const size_t stop = smaller(tile, n - i);
        double part[lanes] = {};
        size_t k = 0;
        for (; k + lanes <= stop; k += lanes)
            for (size_t j = 0; j < lanes; ++j) part[j] += of(x[i + k + j]);
        for (size_t j = 0; k < stop; ++k, ++j) part[j] += of(x[i + k]);
        double whole = 0;
        for (size_t j = 0; j < lanes; ++j) whole += part[j];
        total += whole;
    }
    return total;
}

template <double (*of)(float)>
double sum(const float* x, size_t n) {
    return sum_by(x, n, [](float each) { return of(each); });
}

// The largest |x|, or NaN where one is not finite.
double largest_of(const float* x, size_t n) {
    const uint32_t most = absmax_bits(x, n);
    return double(most < infinity_bits ? float_of(most) : quiet_nan());
}

void block_sums(const float* x, size_t numel, size_t block, int kind, double* out) {
    const auto of = kind == 3 ? largest_of : kind == 0 ? sum<plain> : kind == 1 ? sum<absolute> : sum<square>;
    for (size_t i = 0; i < numel; i += block) *out++ = of(x + i, smaller(block, numel - i));
}

// ---- codes: a byte an element here, `bits` on the wire; `codes` has room for whole words

template <int bits>
void squeeze(const uint8_t* codes, size_t n, uint8_t* out) {
    if constexpr (bits == 8) {
        std::memcpy(out, codes, n);
        return;
    }
    size_t k = 0;
    for (; bits == 1 && k + 8 <= n; k += 8) {
        uint64_t word;
        std::memcpy(&word, codes + k, 8);
        *out++ = uint8_t(word * 0x0102040810204080u >> 56);
    }
    for (; bits == 2 && k + 4 <= n; k += 4)
        *out++ = uint8_t(codes[k] | codes[k + 1] << 2 | codes[k + 2] << 4 | codes[k + 3] << 6);
    for (; bits == 4 && k + 2 <= n; k += 2) *out++ = uint8_t(codes[k] | codes[k + 1] << 4);
    if (k == n) return;
    unsigned last = 0;
    for (int shift = 0; k < n; ++k, shift += bits) last |= unsigned(codes[k]) << shift;
    *out = uint8_t(last);
}

// Writes whole bytes' worth of codes: up to 7 more than `n`.
template <int bits>
void spread(const uint8_t* data, size_t n, uint8_t* codes) {
    if constexpr (bits == 8) {
        std::memcpy(codes, data, n);
        return;
    }
    const size_t nbytes = (n * bits + 7) / 8;
    for (size_t i = 0; i < nbytes; ++i) {
        if constexpr (bits == 1) {
            const uint64_t each = (data[i] * 0x0101010101010101u) & 0x8040201008040201u;
            const uint64_t word = (each + 0x7f7f7f7f7f7f7f7fu) >> 7 & 0x0101010101010101u;
            std::memcpy(codes + 8 * i, &word, 8);
        } else if constexpr (bits == 2) {
            for (int j = 0; j < 4; ++j) codes[4 * i + j] = data[i] >> (2 * j) & 3;
        } else {
            codes[2 * i] = data[i] & 15;
            codes[2 * i + 1] = data[i] >> 4;
        }
    }
}

void squeeze(int bits, const uint8_t* codes, size_t n, uint8_t* out) {
    bits == 1   ? squeeze<1>(codes, n, out)
    : bits == 2 ? squeeze<2>(codes, n, out)
    : bits == 4 ? squeeze<4>(codes, n, out)
                : squeeze<8>(codes, n, out);
}

void spread(int bits, const uint8_t* data, size_t n, uint8_t* codes) {
    bits == 1   ? spread<1>(data, n, codes)
    : bits == 2 ? spread<2>(data, n, codes)
    : bits == 4 ? spread<4>(data, n, codes)
                : spread<8>(data, n, codes);
}

// ---- signs

void pack_signs(const float* x, size_t numel, size_t block, int means, uint8_t* out) {
    for (size_t start = 0; start < numel; start += block) {
        const size_t n = smaller(block, numel - start);
        const float* own = x + start;
        if (means) {
            const bool finite = absmax_bits(own, n) < infinity_bits;
            double low = sum<below>(own, n), high = sum<above>(own, n);
            float head[2];
            if (means == 1) {
                head[0] = float((high - low) / double(n));
            } else {
                int32_t under = 0;  // a block is shorter than 2^31
                for (size_t k = 0; k < n; ++k) under += own[k] < 0;
                const int32_t over = int32_t(n) - under;
                head[0] = under ? float(low / double(under)) : 0.0f;
                head[1] = over ? float(high / double(over)) : 0.0f;
            }
            if (!finite) head[0] = head[1] = quiet_nan();
            std::memcpy(out, head, sizeof(float) * size_t(means));
            out += sizeof(float) * size_t(means);
        }
        for (size_t i = 0; i < n; i += tile) {
            const size_t count = smaller(tile, n - i);
            uint8_t codes[tile];
            for (size_t k = 0; k < count; ++k) codes[k] = own[i + k] >= 0;
            squeeze<1>(codes, count, out);
            out += (count + 7) / 8;
        }
    }
}

template <bool add>
void choose(const uint8_t* __restrict codes, size_t n, float low, float high, float* __restrict out) {
    const uint32_t base = bits_of(low), other = base ^ bits_of(high);
    for (size_t k = 0; k < n; ++k)
        out[k] = (add ? out[k] : 0.0f) + float_of(base ^ (other & (0u - uint32_t(codes[k]))));
}

void unpack_signs(const uint8_t* data, size_t numel, size_t block, int means, float gain, bool add,
                  float* out) {
    for (size_t start = 0; start < numel; start += block) {
        float head[2] = {1.0f, 1.0f};
        std::memcpy(head, data, sizeof(float) * size_t(means));
        data += sizeof(float) * size_t(means);
        const float low = gain * (means == 2 ? head[0] : -head[0]), high = gain * head[means == 2];
        const size_t end = start + smaller(block, numel - start);
        for (size_t i = start, n; i < end; i += n) {
            n = smaller(tile, end - i);
            uint8_t codes[tile];
            spread<1>(data, n, codes);
            add ? choose<true>(codes, n, low, high, out + i) : choose<false>(codes, n, low, high, out + i);
            data += (n + 7) / 8;
        }
    }
}

// ---- two bits

uint32_t magnitude(float x) { return bits_of(x) & 0x7fffffffu; }

// What |x| up to `limit` and above it are on average, and the limit, which is as far from both.
struct TwoMeans {
    uint32_t limit;
    float low, high;
};

TwoMeans fit(const float* x, size_t n) {
    const double whole = sum<absolute>(x, n), count = double(n);
    if (absmax_bits(x, n) >= infinity_bits) return {infinity_bits, quiet_nan(), quiet_nan()};
    float limit = float(1.3 * whole / count);
    double low = 0, high = 0;
    for (int turn = 0; turn < fitting; ++turn) {
        if (turn) limit = float((low + high) / 2);
        const uint32_t most = bits_of(limit);
        const double above = sum_by(x, n, [most](float each) {
            const uint32_t own = magnitude(each);
            return double(float_of(own & (0u - uint32_t(own > most))));
        });
        int32_t over = 0;  // a block is shorter than 2^31
        for (size_t k = 0; k < n; ++k) over += magnitude(x[k]) > most;
        const double under = count - double(over);
        low = under > 0 ? (whole - above) / under : 0;
        high = over ? above / double(over) : 0;
    }
    return {bits_of(limit), float(low), float(high)};
}

void pack_two_bits(const float* x, size_t numel, size_t block, uint8_t* out) {
    for (size_t start = 0; start < numel; start += block) {
        const size_t n = smaller(block, numel - start);
        const float* own = x + start;
        const TwoMeans means = fit(own, n);
        std::memcpy(out, &means.low, sizeof(float));
        std::memcpy(out + sizeof(float), &means.high, sizeof(float));
        out += 2 * sizeof(float);
        for (size_t i = 0; i < n; i += tile) {
            const size_t count = smaller(tile, n - i);
            uint8_t codes[tile];
            for (size_t k = 0; k < count; ++k)
                codes[k] =
                    uint8_t(bits_of(own[i + k]) >> 31 | uint32_t(magnitude(own[i + k]) > means.limit) << 1);
            squeeze<2>(codes, count, out);
            out += (count + 3) / 4;
        }
    }
}

template <bool add>
void choose_of_four(const uint8_t* __restrict codes, size_t n, float low, float high, float* __restrict out) {
    const uint32_t base = bits_of(low), other = base ^ bits_of(high);
    for (size_t k = 0; k < n; ++k) {
        const uint32_t code = codes[k];
        out[k] = (add ? out[k] : 0.0f) + float_of((base ^ (other & (0u - (code >> 1)))) ^ code << 31);
    }
}

void unpack_two_bits(const uint8_t* data, size_t numel, size_t block, float gain, bool add, float* out) {
    for (size_t start = 0; start < numel; start += block) {
        float means[2];
        std::memcpy(means, data, sizeof means);
        data += sizeof means;
        const float low = gain * means[0], high = gain * means[1];
        const size_t end = start + smaller(block, numel - start);
        for (size_t i = start, n; i < end; i += n) {
            n = smaller(tile, end - i);
            uint8_t codes[tile];
            spread<2>(data, n, codes);
            add ? choose_of_four<true>(codes, n, low, high, out + i)
                : choose_of_four<false>(codes, n, low, high, out + i);
            data += (n + 3) / 4;
        }
    }
}

// ---- levels

void quantize(const float* __restrict x, uint32_t n, float inv, int levels, int offset, Stream random,
              uint8_t* __restrict codes) {
    for (uint32_t k = 0; k < n; ++k) {
        const float v = x[k] * inv + uniform(random(k));
        int32_t q = int32_t(v);  // std::floor is a call on SSE2
        q -= float(q) > v;
        q = q > levels ? levels : q;
        q = q < -levels ? -levels : q;
        codes[k] = uint8_t(q + offset);
    }
}

void pack_levels(const float* x, size_t numel, size_t block, int bits, int levels, bool euclidean,
                 uint64_t seed, uint8_t* out) {
    const int offset = 1 << (bits - 1);
    for (size_t start = 0; start < numel; start += block) {
        const size_t length = smaller(block, numel - start), end = start + length;
        const uint32_t most = absmax_bits(x + start, length);
        float unit = quiet_nan();
        if (most < infinity_bits) {
            const double norm =
                euclidean ? __builtin_sqrt(sum<square>(x + start, length)) : double(float_of(most));
            const double wide = norm / double(levels);
            unit = wide > double(largest) ? largest : float(wide);
            unit = unit < smallest_unit ? 0.0f : unit;
        }
        std::memcpy(out, &unit, sizeof unit);
        out += sizeof unit;
        for (size_t i = start, n; i < end; i += n) {
            n = tile_at(i, end - i);
            uint8_t codes[tile];
            if (unit > 0)
                quantize(x + i, uint32_t(n), 1.0f / unit, levels, offset, Stream(seed, i), codes);
            else
                std::memset(codes, offset, n);
            squeeze(bits, codes, n, out);
            out += (n * size_t(bits) + 7) / 8;
        }
    }
}

template <bool add>
void dequantize(const uint8_t* __restrict codes, size_t n, int offset, float unit, float gain,
                float* __restrict out) {
    for (size_t k = 0; k < n; ++k)
        out[k] = (add ? out[k] : 0.0f) + gain * (float(int32_t(codes[k]) - offset) * unit);
}

void unpack_levels(const uint8_t* data, size_t numel, size_t block, int bits, float gain, bool add,
                   float* out) {
    const int offset = 1 << (bits - 1);
    for (size_t start = 0; start < numel; start += block) {
        float unit;
        std::memcpy(&unit, data, sizeof unit);
        data += sizeof unit;
        const size_t end = start + smaller(block, numel - start);
        for (size_t i = start, n; i < end; i += n) {
            n = smaller(tile, end - i);
            uint8_t codes[tile];
            spread(bits, data, n, codes);
            add ? dequantize<true>(codes, n, offset, unit, gain, out + i)
                : dequantize<false>(codes, n, offset, unit, gain, out + i);
            data += (n * size_t(bits) + 7) / 8;
        }
    }
}

// ---- ternary, and what adds it

void pack_ternary(const float* x, size_t numel, size_t block, const float* limits, const float* scales,
                  uint64_t seed, uint8_t* out) {
    // Codes of a block may end within a byte: tiles follow the bytes, not the blocks.
    for (size_t i = 0, n; i < numel; i += n) {
        n = tile_at(i, numel - i);
        uint8_t codes[tile];
        const Stream random(seed, i);
        for (size_t k = 0; k < n;) {
            const size_t at = (i + k) / block, stop = smaller(n, (at + 1) * block - i);
            const float limit = limits[at], scale = scales[at];
            const float inv = scale >= smallest_unit && scale <= largest ? 1.0f / scale : 0.0f;
            for (; k < stop; ++k) {
                const uint32_t own = bits_of(x[i + k]);
                float size = float_of(own & 0x7fffffffu);
                size = size > limit ? limit : size;
                const uint32_t chosen = uniform(random(uint32_t(k))) < size * inv;
                codes[k] = uint8_t(1 + chosen - 2 * (chosen & own >> 31));
            }
        }
        squeeze<2>(codes, n, out);
        out += (n + 3) / 4;
    }
}

template <class Lane, bool add>
void widen(const uint8_t* __restrict values, size_t n, Lane* __restrict sums) {
    for (size_t k = 0; k < n; ++k) sums[k] = Lane((add ? sums[k] : 0) + values[k]);
}

template <class Lane>
void add_codes(const uint8_t* index, size_t numel, int bits, const uint8_t* table, bool add, Lane* sums) {
    const size_t per_byte = 8 / size_t(bits);
    uint8_t values[256][8] = {};  // of all codes of a byte
    for (size_t byte = 0; byte < 256; ++byte)
        for (size_t j = 0; j < per_byte; ++j)
            values[byte][j] = table[byte >> (j * size_t(bits)) & ((1u << bits) - 1)];
    for (size_t i = 0, n; i < numel; i += n) {
        n = smaller(tile, numel - i);
        uint8_t buffer[tile + 8];
        if (bits == 1)
            for (size_t k = 0; k < n; k += 8) std::memcpy(buffer + k, values[*index++], 8);
        else
            for (size_t k = 0; k < n; k += 4) std::memcpy(buffer + k, values[*index++], 4);
        add ? widen<Lane, true>(buffer, n, sums + i) : widen<Lane, false>(buffer, n, sums + i);
    }
}

template <class Lane, bool vote>
void decode(const Lane* __restrict sums, size_t n, int32_t times, int32_t count, float scale,
            float* __restrict out) {
    for (size_t k = 0; k < n; ++k) {
        const int32_t d = times * int32_t(sums[k]) - count;
        out[k] = scale * float(vote ? ((d > 0) - (d < 0)) * count : d);
    }
}

template <class Lane>
void decode_votes(const Lane* sums, size_t numel, int times, int count, bool vote, size_t block,
                  const float* scales, float* out) {
    for (size_t i = 0; i < numel; i += block) {
        const size_t n = smaller(block, numel - i);
        const float scale = *scales++;
        vote ? decode<Lane, true>(sums + i, n, times, count, scale, out + i)
             : decode<Lane, false>(sums + i, n, times, count, scale, out + i);
    }
}

// ---- powers of two

void pack_natural(const float* x, size_t numel, uint64_t seed, uint8_t* out) {
    for (size_t i = 0, n; i < numel; i += n) {
        n = tile_at(i, numel - i);
        uint8_t signs[tile], exponents[tile], bits[tile / 8];
        const Stream random(seed, i);
        for (uint32_t k = 0; k < uint32_t(n); ++k) {
            // A mantissa is how far x is on the way to the next power: a random one carries as often.
            const uint32_t own = bits_of(x[i + k]), size = own & 0x7fffffffu;
            uint32_t exponent = (size + (random(k) >> 9)) >> 23;
            exponent = size >= infinity_bits ? 255u : exponent > 254u ? 254u : exponent;
            exponents[k] = uint8_t(exponent);
            signs[k] = uint8_t(own >> 31);
        }
        squeeze<1>(signs, n, bits);
        size_t k = 0;
        for (; k + 8 <= n; k += 8, out += 9) {
            *out = bits[k / 8];
            std::memcpy(out + 1, exponents + k, 8);
        }
        if (k < n) {
            *out++ = bits[k / 8];
            std::memcpy(out, exponents + k, n - k);
        }
    }
}

template <bool add>
void powers(const uint8_t* __restrict signs, const uint8_t* __restrict exponents, size_t n, float gain,
            float* __restrict out) {
    for (size_t k = 0; k < n; ++k) {
        const uint32_t exponent = exponents[k];
        const uint32_t size = exponent << 23 | (exponent == 255 ? 0x400000u : 0u);
        out[k] = (add ? out[k] : 0.0f) + gain * float_of(size | uint32_t(signs[k]) << 31);
    }
}

void unpack_natural(const uint8_t* data, size_t numel, float gain, bool add, float* out) {
    for (size_t i = 0, n; i < numel; i += n) {
        n = smaller(tile, numel - i);
        uint8_t signs[tile], exponents[tile], bits[tile / 8];
        size_t k = 0;
        for (; k + 8 <= n; k += 8, data += 9) {
            bits[k / 8] = *data;
            std::memcpy(exponents + k, data + 1, 8);
        }
        if (k < n) {
            bits[k / 8] = *data++;
            std::memcpy(exponents + k, data, n - k);
        }
        spread<1>(bits, n, signs);
        add ? powers<true>(signs, exponents, n, gain, out + i)
            : powers<false>(signs, exponents, n, gain, out + i);
    }
}

// ---- 8-bit floats

template <int mantissa>
struct Fp8 {
    static constexpr int shift = 23 - mantissa, bias = mantissa == 3 ? 7 : 15;
    static constexpr uint32_t rebias = uint32_t(127 - bias) << mantissa;
    static constexpr int32_t most = mantissa == 3 ? 0x7e : 0x7b;
    static constexpr float reach = mantissa == 3 ? 448.0f : 57344.0f;
    static constexpr float least = mantissa == 3 ? 0x1p-6f : 0x1p-14f;    // normal
    static constexpr float grain = mantissa == 3 ? 0x1p-9f : 0x1p-16f;    // of what is below
    static constexpr float per_grain = mantissa == 3 ? 0x1p9f : 0x1p16f;  // 1 / grain
};

template <int mantissa, bool stochastic>
void to_fp8(const float* __restrict x, uint32_t n, float inv, Stream random, uint8_t* __restrict out) {
    using F = Fp8<mantissa>;
    for (uint32_t k = 0; k < n; ++k) {
        const uint32_t own = bits_of(x[k]), word = stochastic ? random(k) : 0u;
        const float v = float_of(own & 0x7fffffffu) * inv;
        const int32_t bits = int32_t(bits_of(v)), small = -int32_t(bits < int32_t(bits_of(F::least)));
        const int32_t noise = stochastic ? int32_t(word >> (32 - F::shift))
                                         : ((1 << (F::shift - 1)) - 1) + (bits >> F::shift & 1);
        const int32_t normal = ((bits + noise) >> F::shift) - int32_t(F::rebias);
        // 2^23 more: a float has no bits behind the point then, and rounds to the nearest, ties to even.
        const float grains = float_of(bits_of(v * F::per_grain) & uint32_t(small));
        const int32_t fine =
            stochastic ? int32_t(grains + uniform(word)) : int32_t(bits_of(grains + 0x1p23f) & 0xffu);
        const int32_t code = (fine & small) | (normal & ~small);
        out[k] = uint8_t((code > F::most ? F::most : code) | int32_t(own >> 31) << 7);
    }
}

template <int mantissa, bool add>
void from_fp8(const uint8_t* __restrict data, size_t n, float scale, float gain, float* __restrict out) {
    using F = Fp8<mantissa>;
    for (size_t k = 0; k < n; ++k) {
        const uint32_t code = data[k] & 0x7fu;
        const float fine = float(int32_t(code)) * F::grain;
        const float normal = float_of((code + F::rebias) << F::shift);
        const uint32_t small = 0u - uint32_t(code >> mantissa == 0);
        const uint32_t size = (bits_of(fine) & small) | (bits_of(normal) & ~small);
        const float value = float_of(size | uint32_t(data[k] >> 7) << 31);
        out[k] = (add ? out[k] : 0.0f) + gain * (value * scale);
    }
}

template <int mantissa>
void pack_fp8(const float* x, size_t numel, size_t block, bool stochastic, uint64_t seed, uint8_t* out) {
    for (size_t start = 0; start < numel; start += block) {
        const size_t end = start + smaller(block, numel - start);
        const uint32_t most = absmax_bits(x + start, end - start);
        float scale = most >= infinity_bits ? quiet_nan() : float_of(most) / Fp8<mantissa>::reach;
        scale = scale < smallest_unit ? 0.0f : scale;
        std::memcpy(out, &scale, sizeof scale);
        out += sizeof scale;
        for (size_t i = start, n; i < end; i += n) {
            n = tile_at(i, end - i);
            const Stream random(seed, i);
            if (!(scale > 0))
                std::memset(out, 0, n);
            else if (stochastic)
                to_fp8<mantissa, true>(x + i, uint32_t(n), 1.0f / scale, random, out);
            else
                to_fp8<mantissa, false>(x + i, uint32_t(n), 1.0f / scale, random, out);
            out += n;
        }
    }
}

template <int mantissa>
void unpack_fp8(const uint8_t* data, size_t numel, size_t block, float gain, bool add, float* out) {
    for (size_t start = 0; start < numel; start += block) {
        const size_t n = smaller(block, numel - start);
        float scale;
        std::memcpy(&scale, data, sizeof scale);
        data += sizeof scale;
        add ? from_fp8<mantissa, true>(data, n, scale, gain, out + start)
            : from_fp8<mantissa, false>(data, n, scale, gain, out + start);
        data += n;
    }
}

void pack_fp8(const float* x, size_t numel, size_t block, int mantissa, bool stochastic, uint64_t seed,
              uint8_t* out) {
    mantissa == 3 ? pack_fp8<3>(x, numel, block, stochastic, seed, out)
                  : pack_fp8<2>(x, numel, block, stochastic, seed, out);
}

void unpack_fp8(const uint8_t* data, size_t numel, size_t block, int mantissa, float gain, bool add,
                float* out) {
    mantissa == 3 ? unpack_fp8<3>(data, numel, block, gain, add, out)
                  : unpack_fp8<2>(data, numel, block, gain, add, out);
}

}  // namespace

#define TACIT_TEXT_(x) #x
#define TACIT_TEXT(x) TACIT_TEXT_(x)
#define TACIT_CODES(Lane) {add_codes<Lane>, decode_votes<Lane>}

namespace tacit::TACIT_VARIANT {
extern const FewBitsKernels fewbits_kernels{TACIT_TEXT(TACIT_VARIANT),
                                            block_sums,
                                            pack_signs,
                                            unpack_signs,
                                            pack_two_bits,
                                            unpack_two_bits,
                                            pack_levels,
                                            unpack_levels,
                                            pack_ternary,
                                            pack_natural,
                                            unpack_natural,
                                            pack_fp8,
                                            unpack_fp8,
                                            TACIT_CODES(uint8_t),
                                            TACIT_CODES(uint16_t),
                                            TACIT_CODES(int32_t)};
}
