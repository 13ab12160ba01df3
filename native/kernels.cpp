// The loops over elements. CMake compiles this file once an instruction set, which TACIT_VARIANT names.
//
// Trap: nothing from the standard library but types may appear here. An inline function such as std::min
// would be emitted in every build under one name, and the linker could keep the AVX-512 copy for everyone.
// All builds give the same bits: only IEEE operations, in one order, and never fused (-ffp-contract=off).
#include "kernels.h"

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

constexpr size_t tile = 512;  // codes worked on at a time: even, and small enough to stay in the first cache
constexpr uint32_t infinity_bits = 0x7f800000u;
constexpr uint32_t quiet_nan_bits = 0x7fc00000u;
constexpr float smallest_absmax = 1e-30f;  // keeps 1 / scale far from overflow; smaller blocks are zero

size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

// How many of the `n` elements from `first` on to do at once.
size_t tile_at(uint64_t first, size_t n) {
    return smaller(smaller(tile, n), (uint64_t(1) << 32) - uint32_t(first));
}

// Bit pattern of the largest |x|. As integers NaN > infinity > finite: one pass also finds those.
uint32_t absmax_bits(const float* x, size_t n) {
    int32_t most = 0;  // signed, as SSE2 cannot compare unsigned; the sign bit is masked off
    for (size_t k = 0; k < n; ++k) {
        const int32_t bits = __builtin_bit_cast(int32_t, x[k]) & 0x7fffffff;
        most = bits > most ? bits : most;
    }
    return uint32_t(most);
}

template <int qmax, bool stochastic>
void quantize(const float* __restrict x, uint32_t n, float inv, Stream random, int8_t* __restrict q) {
    for (uint32_t k = 0; k < n; ++k) {
        float v = x[k] * inv;
        v += stochastic ? float(int32_t(random(k) >> 8)) * 0x1p-24f : 0.5f;
        int32_t floor = int32_t(v);  // std::floor is a call on SSE2
        floor -= float(floor) > v;
        floor = floor > qmax ? qmax : floor;
        q[k] = int8_t(floor < -qmax ? -qmax : floor);
    }
}

// An odd `n` leaves the last high nibble 0.
void pack_nibbles(const int8_t* __restrict q, size_t n, uint8_t* __restrict out) {
    for (size_t k = 0; k < n / 2; ++k) out[k] = uint8_t((q[2 * k] + 8) | (q[2 * k + 1] + 8) << 4);
    if (n % 2) out[n / 2] = uint8_t(q[n - 1] + 8);
}

void unpack_nibbles(const uint8_t* __restrict data, size_t n, int8_t* __restrict q) {
    for (size_t k = 0; k < n / 2; ++k) {
        q[2 * k] = int8_t((data[k] & 15) - 8);
        q[2 * k + 1] = int8_t((data[k] >> 4) - 8);
    }
    if (n % 2) q[n - 1] = int8_t((data[n / 2] & 15) - 8);
}

template <bool add>
void dequantize(const int8_t* __restrict q, size_t n, float scale, float gain, float* __restrict out) {
    for (size_t k = 0; k < n; ++k) out[k] = (add ? out[k] : 0.0f) + gain * (float(q[k]) * scale);
}

template <int bits, bool stochastic>
size_t pack(const float* x, size_t numel, size_t block, uint64_t seed, uint8_t* out) {
    constexpr int qmax = (1 << (bits - 1)) - 1;
    size_t broken = 0;
    for (size_t start = 0; start < numel; start += block) {
        const size_t end = start + smaller(block, numel - start);
        const uint32_t most = absmax_bits(x + start, end - start);
        const float absmax = __builtin_bit_cast(float, most);
        float scale = 0.0f;
        if (most >= infinity_bits)
            scale = __builtin_bit_cast(float, quiet_nan_bits);
        else if (absmax >= smallest_absmax)
            scale = absmax / float(qmax);
        broken += most >= infinity_bits;
        std::memcpy(out, &scale, sizeof scale);
        out += sizeof scale;

        for (size_t i = start, n; i < end; i += n) {
            n = tile_at(i, end - i);
            int8_t buffer[tile];
            int8_t* q = bits == 8 ? reinterpret_cast<int8_t*>(out) : buffer;
            if (scale > 0)  // neither zero nor NaN
                quantize<qmax, stochastic>(x + i, uint32_t(n), 1.0f / scale, Stream(seed, i), q);
            else
                std::memset(q, 0, n);
            if (bits == 4) pack_nibbles(q, n, out);
            out += bits == 8 ? n : (n + 1) / 2;
        }
    }
    return broken;
}

template <int bits, bool add>
void unpack(const uint8_t* data, size_t numel, size_t block, float gain, float* out) {
    for (size_t start = 0; start < numel; start += block) {
        const size_t end = start + smaller(block, numel - start);
        float scale;
        std::memcpy(&scale, data, sizeof scale);
        data += sizeof scale;

        for (size_t i = start, n; i < end; i += n) {
            n = smaller(tile, end - i);
            int8_t buffer[tile];
            if (bits == 4) unpack_nibbles(data, n, buffer);
            dequantize<add>(bits == 8 ? reinterpret_cast<const int8_t*>(data) : buffer, n, scale, gain,
                            out + i);
            data += bits == 8 ? n : (n + 1) / 2;
        }
    }
}

template <int bits>
size_t pack(const float* x, size_t numel, size_t block, uint64_t seed, bool stochastic, uint8_t* out) {
    return stochastic ? pack<bits, true>(x, numel, block, seed, out)
                      : pack<bits, false>(x, numel, block, seed, out);
}

template <int bits>
void unpack(const uint8_t* data, size_t numel, size_t block, float gain, bool add, float* out) {
    add ? unpack<bits, true>(data, numel, block, gain, out)
        : unpack<bits, false>(data, numel, block, gain, out);
}

void random_bits(uint64_t seed, size_t numel, uint32_t* out) {
    for (size_t i = 0, n; i < numel; i += n) {
        n = tile_at(i, numel - i);
        const Stream random(seed, i);
        for (uint32_t k = 0; k < n; ++k) out[i + k] = random(k);
    }
}

// Partial sums in a fixed number of lanes, so that all builds add in one order; a tile's are few enough for
// floats.
double keep(const float* __restrict x, const float* __restrict reference, size_t numel,
            float* __restrict out) {
    constexpr size_t lanes = 16;
    double total = 0;
    for (size_t i = 0, n; i < numel; i += n) {
        n = smaller(tile, numel - i);
        float sums[lanes] = {};
        size_t k = 0;
        for (; k + lanes <= n; k += lanes)
            for (size_t j = 0; j < lanes; ++j) {
                const float now = x[i + k + j], moved = now - reference[i + k + j];
                out[i + k + j] = now;
                sums[j] += moved * moved;
            }
        for (; k < n; ++k) {
            const float now = x[i + k], moved = now - reference[i + k];
            out[i + k] = now;
            sums[k % lanes] += moved * moved;
        }
        for (size_t j = 0; j < lanes; ++j) total += double(sums[j]);
    }
    return total;
}

float widened(float x) { return x; }
float widened(uint16_t bf16) { return __builtin_bit_cast(float, uint32_t(bf16) << 16); }

// A tile is divided, and then looked at while it is in the first cache. `out` may be `total` itself.
template <class Number>
bool mean(const Number* total, size_t numel, float count, float* out) {
    const uint32_t mantissa = __builtin_bit_cast(uint32_t, count) & 0x007fffffu;
    const float share =
        1.0f / count;  // exact where count is a power of two: then the bits are those of a division
    bool finite = true;
    for (size_t i = 0, n; i < numel; i += n) {
        n = smaller(tile, numel - i);
        if (mantissa == 0)
            for (size_t k = 0; k < n; ++k) out[i + k] = widened(total[i + k]) * share;
        else
            for (size_t k = 0; k < n; ++k) out[i + k] = widened(total[i + k]) / count;
        finite &= absmax_bits(out + i, n) < infinity_bits;
    }
    return finite;
}

}  // namespace

#define TACIT_TEXT_(x) #x
#define TACIT_TEXT(x) TACIT_TEXT_(x)

namespace tacit::TACIT_VARIANT {
extern const Kernels kernels{TACIT_TEXT(TACIT_VARIANT),
                             pack<8>,
                             pack<4>,
                             unpack<8>,
                             unpack<4>,
                             random_bits,
                             keep,
                             mean<float>,
                             mean<uint16_t>};
}
