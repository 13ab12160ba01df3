// Packed blocks: a float vector as small integers, with one float32 scale for every `block` elements.
//
// The wire form of a vector is its blocks one after another, each a record:
//
//     float32 little-endian   scale
//     8 bits                  one two's-complement byte an element
//     4 bits                  two elements a byte: code = q + 8, the even element in the low nibble
//
// The last block is cut short: ceil(n * bits / 8) code bytes, an unused nibble is 0. No elements, no bytes.
// A block that holds NaN or infinity has scale NaN and decodes to NaN everywhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tacit {

struct Layout {
    int bits;           // 8 or 4
    std::size_t block;  // elements a block: even, at least 2

    // Bytes of one record of `n` elements.
    std::size_t record_nbytes(std::size_t n) const { return sizeof(float) + (bits == 8 ? n : (n + 1) / 2); }
};

// Bytes of `numel` packed elements. Throws std::invalid_argument if `layout` is not one we write.
std::size_t packed_nbytes(std::size_t numel, Layout layout);

// Packs all of `x` into `out`, of exactly packed_nbytes(x.size(), layout). `stochastic` rounds up with the
// probability that makes the mean right, by the bits that `seed` gives; otherwise to the nearest.
// Returns how many blocks held a value that is not finite.
std::size_t pack_blocks(std::span<const float> x, Layout layout, std::uint64_t seed, bool stochastic,
                        std::span<std::uint8_t> out);

// out[i] = (add ? out[i] : 0) + gain * decoded[i], over all of `out`.
void unpack_blocks(std::span<const std::uint8_t> data, Layout layout, float gain, bool add,
                   std::span<float> out);

// The bits that stochastic rounding uses for elements 0, 1, 2, ... under `seed`.
void random_bits(std::uint64_t seed, std::span<std::uint32_t> out);

// out = x, and |x - reference|^2, in one pass; the three do not overlap.
double keep(std::span<const float> x, std::span<const float> reference, std::span<float> out);

// out = total / count, and whether all of it is finite, in the same pass. `out` may be `total` itself.
bool mean(std::span<const float> total, std::size_t count, std::span<float> out);
// The same of the bits of bfloat16.
bool mean_bf16(std::span<const std::uint16_t> total, std::size_t count, std::span<float> out);

// The instruction sets this build has and this CPU can run, slowest first. All give the same bits.
std::vector<std::string> simd_variants();
std::string simd();
// Throws std::invalid_argument, naming the choices, for a name that is not in simd_variants().
void use_simd(std::string_view name);

}  // namespace tacit
