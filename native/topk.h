// The largest few of every chunk, in a few bits each: the wire of src/tacit/codecs/topk.py, whose Rows says
// what lies where.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tacit {

// One row for every `length` elements; `kept` of them are said, each with a sign and one of 2^(bits - 1)
// levels. Of an index `low` bits are written out, and the rest in `high` bits for all of them.
struct Rows {
    std::size_t length, kept;
    int bits, low;
    std::size_t high;

    std::size_t levels() const { return std::size_t(1) << (bits - 1); }
    std::size_t nbytes() const { return 2 * levels() + (kept * (low + bits) + high + 7) / 8; }
};

// Packs x, of whole rows, into out, of nbytes() each. A row that holds a NaN or an infinity has NaN levels.
void topk_pack(std::span<const float> x, Rows rows, std::span<std::uint8_t> out);

// out += what `data` says. Rows with NaN levels make all of theirs NaN. Throws std::invalid_argument for rows
// that name elements which are not there, or not in order.
void topk_add(std::span<const std::uint8_t> data, Rows rows, std::span<float> out);

}  // namespace tacit
