#include "row_index.h"

#include "refuse.h"
#include "workers.h"

namespace tacit {
namespace {

using std::int64_t;
using std::size_t;
using std::uint64_t;

constexpr int smallest_log2 = 6;
constexpr size_t share = 4096;                    // keys that are worth a thread's while
constexpr uint64_t own_key = 0x2545f4914f6cdd1d;  // owners mix another: keys of one owner must not collide

void check(size_t keys, size_t rows) {
    if (keys != rows) refuse("rows has ", rows, " elements: there are ", keys, " keys");
}

}  // namespace

RowIndex::RowIndex() : cells_(size_t(1) << smallest_log2, Cell{0, -1}), shift_(64 - smallest_log2) {}

// The cell that holds `key`, or the empty one where it would be.
size_t RowIndex::place(int64_t key) const {
    const size_t mask = cells_.size() - 1;
    size_t at = mixed(uint64_t(key) + own_key) >> shift_;
    while (cells_[at].row >= 0 && cells_[at].key != key) at = (at + 1) & mask;
    return at;
}

void RowIndex::find(std::span<const int64_t> keys, std::span<int64_t> rows, int threads) const {
    check(keys.size(), rows.size());
    if (threads < 1 || threads > 1024) refuse("threads=", threads, ": from 1 to 1024");
    share_out(keys.size(), share, size_t(threads), [&](size_t, size_t begin, size_t end) {
        for (size_t i = begin; i < end; ++i) rows[i] = cells_[place(keys[i])].row;
    });
}

size_t RowIndex::add(std::span<const int64_t> keys, std::span<int64_t> rows) {
    check(keys.size(), rows.size());
    for (size_t i = 0; i < keys.size(); ++i) {
        size_t at = place(keys[i]);
        if (cells_[at].row < 0) {
            if (8 * (keys_.size() + 1) > 5 * cells_.size()) {
                grow();
                at = place(keys[i]);
            }
            keys_.push_back(keys[i]);
            cells_[at] = {keys[i], int64_t(keys_.size()) - 1};
        }
        rows[i] = cells_[at].row;
    }
    return keys_.size();
}

void RowIndex::grow() {
    cells_.assign(2 * cells_.size(), Cell{0, -1});
    --shift_;
    for (size_t row = 0; row < keys_.size(); ++row) cells_[place(keys_[row])] = {keys_[row], int64_t(row)};
}

}  // namespace tacit
