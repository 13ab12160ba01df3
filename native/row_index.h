// Which row of a shard holds which key: open addressing, linear probing, grows. Any 64-bit key is allowed.
//
// Rows are numbered 0, 1, 2, ... in the order in which their keys were added, and keep their number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace tacit {

// The finaliser of splitmix64 (Steele et al. 2014): what owners, row values and the index start from.
inline std::uint64_t mixed(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

class RowIndex {
  public:
    RowIndex();

    std::size_t size() const { return keys_.size(); }
    std::span<const std::int64_t> keys() const { return keys_; }

    // The row of each key; -1 where there is none.
    void find(std::span<const std::int64_t> keys, std::span<std::int64_t> rows, int threads) const;

    // Likewise, and keys without a row get the next. Returns how many rows there are then.
    std::size_t add(std::span<const std::int64_t> keys, std::span<std::int64_t> rows);

  private:
    struct Cell {
        std::int64_t key, row;  // row < 0: an empty cell
    };

    std::size_t place(std::int64_t key) const;
    void grow();

    std::vector<Cell> cells_;  // a power of two, at most 5/8 of it in use
    int shift_;
    std::vector<std::int64_t> keys_;
};

}  // namespace tacit
