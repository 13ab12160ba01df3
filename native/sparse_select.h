// Which few elements of many are sent, and their places in few bits: what the sparse codecs need beside a
// dense vector. The wire is that of Rows.index_bits in src/tacit/codecs/topk.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tacit {

// The `kept` largest magnitudes of every `length` elements, rising within each; of equal ones the first, and
// what is not finite before all others. One pass over x for the usual vector: a sample says what is large
// enough, and whatever it says the result is exact.
void select_largest(std::span<const float> x, std::size_t length, std::size_t kept,
                    std::span<std::int64_t> out);

// How many elements are `least` or more in magnitude, or NaN; and which, rising.
std::size_t count_above(std::span<const float> x, float least);
void select_above(std::span<const float> x, float least, std::span<std::int64_t> out);

// 1 for each block of x that holds anything but zeros; the last may be shorter.
void used_blocks(std::span<const float> x, std::size_t block, std::span<std::uint8_t> out);

// u = momentum u + x;  v = v + u;  wanted = v. Where that is not finite, u and v stay as they are.
void accumulate(std::span<const float> x, float momentum, std::span<float> u, std::span<float> v,
                std::span<float> wanted);

// Rising places below `length` as Elias and Fano wrote them: `low` bits of each, then the rest in unary.
std::size_t places_nbytes(std::size_t kept, std::size_t length, int low);
void pack_places(std::span<const std::int64_t> places, std::size_t length, int low,
                 std::span<std::uint8_t> out);
// Throws std::invalid_argument for bytes that name places which are not there, or not in order.
void unpack_places(std::span<const std::uint8_t> data, std::size_t length, int low,
                   std::span<std::int64_t> out);

}  // namespace tacit
