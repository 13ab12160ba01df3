// Numbers in one to nine bits: signs, levels, ternary votes, powers of two and 8-bit floats.
//
// A vector is a row of records, one for every `block` elements, the last cut short; no elements, no bytes.
// In a record a few bytes of head come first, then the codes, the first in the lowest bits of a byte:
//
//     signs     `means` float32 (0, 1 or 2), then a bit an element: x >= 0
//               2: the means of those below zero and of the others; 1: the mean of |x|; 0: nothing, +-1
//     two bits  the means of |x| up to a limit and above it, float32; then 2 bits: sign, and above
//     levels    float32 unit, then 2, 4 or 8 bits: q + 2^(bits - 1) with x ~ q unit
//     natural   of 8 elements: a byte of signs, then their exponents, a byte each; 255 decodes to NaN
//     fp8       float32 scale, then a byte an element: sign, exponent, `mantissa` bits
//
// A block that holds NaN or infinity has a NaN head and decodes to NaN. All instruction sets give the same
// bits. Wrong sizes throw std::invalid_argument.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tacit {

// out[b] = the sum over block b of x (kind 0), |x| (1) or x^2 (2), in an order that is the same everywhere,
// or the largest |x| (3), NaN where a number is not finite.
void block_sums(std::span<const float> x, std::size_t block, int kind, std::span<double> out);

void pack_signs(std::span<const float> x, std::size_t block, int means, std::span<std::uint8_t> out);
// Here and below: out[i] = (add ? out[i] : 0) + gain * decoded[i].
void unpack_signs(std::span<const std::uint8_t> data, std::size_t block, int means, float gain, bool add,
                  std::span<float> out);

// The limit is fitted to the block by Lloyd's steps; an element becomes its sign times the mean of its side.
void pack_two_bits(std::span<const float> x, std::size_t block, std::span<std::uint8_t> out);
void unpack_two_bits(std::span<const std::uint8_t> data, std::size_t block, float gain, bool add,
                     std::span<float> out);

// q = floor(x / unit + u), at most `levels` from 0; unit = |block| / levels, in the Euclidean norm or the
// largest. u is uniform in [0, 1), by the bits that `seed` gives.
void pack_levels(std::span<const float> x, std::size_t block, int bits, int levels, bool euclidean,
                 std::uint64_t seed, std::span<std::uint8_t> out);
void unpack_levels(std::span<const std::uint8_t> data, std::size_t block, int bits, float gain, bool add,
                   std::span<float> out);

// 2 bits an element: 1 + sign(x) with probability min(|x|, limit) / scale, else 1; a limit and a scale a
// block.
void pack_ternary(std::span<const float> x, std::size_t block, std::span<const float> limits,
                  std::span<const float> scales, std::uint64_t seed, std::span<std::uint8_t> out);

// lanes[i] (+)= table[code i] for codes of 1 or 2 bits; `table` has 2 or 4 elements. Lane is uint8_t,
// uint16_t or int32_t.
template <class Lane>
void add_codes(std::span<const std::uint8_t> index, int bits, std::span<const std::uint8_t> table, bool add,
               std::span<Lane> lanes);

// out = scale of the block * d with d = times * lane - count; where `vote`, only the sign of d counts,
// `count` times.
template <class Lane>
void decode_votes(std::span<const Lane> lanes, int times, int count, bool vote, std::size_t block,
                  std::span<const float> scales, std::span<float> out);

// One of the two powers of two around x, at random, so that the mean is x.
void pack_natural(std::span<const float> x, std::uint64_t seed, std::span<std::uint8_t> out);
void unpack_natural(std::span<const std::uint8_t> data, float gain, bool add, std::span<float> out);

// `mantissa` 3: e4m3 (largest 448), 2: e5m2 (largest 57344). To the nearest (ties to even), or stochastic.
void pack_fp8(std::span<const float> x, std::size_t block, int mantissa, bool stochastic, std::uint64_t seed,
              std::span<std::uint8_t> out);
void unpack_fp8(std::span<const std::uint8_t> data, std::size_t block, int mantissa, float gain, bool add,
                std::span<float> out);

}  // namespace tacit
