#include "topk.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "refuse.h"
#include "sparse_select.h"

namespace tacit {
namespace {

constexpr int fitting = 8;  // Lloyd's steps, as in topk.py

// Bits one after another, the lowest of a byte first.
class Bits {
  public:
    explicit Bits(std::uint8_t* at) : at_(at) {}

    void put(std::size_t place, std::uint32_t value, int width) {
        for (int i = 0; i < width; ++i, ++place) at_[place / 8] |= ((value >> i) & 1) << (place % 8);
    }

  private:
    std::uint8_t* at_;
};

// `width` bits from `place` on, 31 at most.
std::uint32_t get(std::span<const std::uint8_t> row, std::size_t place, int width) {
    std::uint64_t word = 0;
    if (place / 8 + sizeof word <= row.size())
        std::memcpy(&word, row.data() + place / 8, sizeof word);
    else
        std::memcpy(&word, row.data() + place / 8, row.size() - place / 8);
    return std::uint32_t(word >> place % 8) & ((1u << width) - 1);
}

// The next bit that is 1 from `place` on, or `stop`.
std::size_t next_one(std::span<const std::uint8_t> row, std::size_t place, std::size_t stop) {
    while (place < stop) {
        const unsigned rest = unsigned(row[place / 8]) >> place % 8;
        if (rest) return std::min(stop, place + std::size_t(std::countr_zero(rest)));
        place = (place / 8 + 1) * 8;
    }
    return stop;
}

// To the nearest, ties to even, as torch does.
std::uint16_t to_bfloat16(float x) {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    if (std::isnan(x)) return 0x7fc0;
    return std::uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float of_bfloat16(std::uint16_t x) { return std::bit_cast<float>(std::uint32_t(x) << 16); }

std::size_t nearest(float size, const std::vector<float>& levels) {
    std::size_t found = 0;
    for (std::size_t i = 0; i + 1 < levels.size(); ++i) found += size > (levels[i] + levels[i + 1]) / 2;
    return found;
}

// Each level becomes the mean of those it is nearest to, from the quantiles on.
std::vector<float> fitted(const std::vector<float>& sizes, std::size_t count) {
    std::vector<float> sorted(sizes), levels(count);
    std::sort(sorted.begin(), sorted.end());
    for (std::size_t i = 0; i < count; ++i) levels[i] = sorted[(2 * i + 1) * sizes.size() / (2 * count)];
    std::vector<double> sums(count);
    std::vector<std::size_t> members(count);
    for (int turn = 0; turn < (count > 1 ? fitting : 1); ++turn) {
        std::fill(sums.begin(), sums.end(), 0.0);
        std::fill(members.begin(), members.end(), 0);
        for (const float size : sizes) {
            const std::size_t level = nearest(size, levels);
            sums[level] += size;
            ++members[level];
        }
        for (std::size_t i = 0; i < count; ++i)
            if (members[i]) levels[i] = float(sums[i] / double(members[i]));
    }
    return levels;
}

void check(const Rows& rows, std::size_t numel, std::size_t nbytes) {
    if (rows.length < 1 || rows.kept < 1 || rows.kept > rows.length || rows.length > (std::size_t(1) << 31) ||
        rows.bits < 1 || rows.bits > 4 || rows.low < 0 || rows.low > 30 ||
        rows.high != rows.kept + ((rows.length - 1) >> rows.low))
        refuse("rows of ", rows.length, " elements, ", rows.kept, " kept, bits=", rows.bits,
               ", low=", rows.low, ", high=", rows.high, " do not go together");
    if (numel % rows.length || nbytes != numel / rows.length * rows.nbytes())
        refuse(numel, " elements and ", nbytes, " bytes are not rows of ", rows.length, " elements and ",
               rows.nbytes(), " bytes");
}

}  // namespace

void topk_pack(std::span<const float> x, Rows rows, std::span<std::uint8_t> out) {
    check(rows, x.size(), out.size());
    std::fill(out.begin(), out.end(), std::uint8_t(0));
    std::vector<std::int64_t> places(x.size() / rows.length * rows.kept);
    select_largest(x, rows.length, rows.kept, places);
    std::vector<float> sizes(rows.kept);
    std::uint8_t* row = out.data();
    const std::int64_t* picked = places.data();
    for (std::size_t start = 0; start < x.size();
         start += rows.length, row += rows.nbytes(), picked += rows.kept) {
        const float* const own = x.data() + start;
        bool finite = true;
        for (std::size_t k = 0; k < rows.kept; ++k) {
            sizes[k] = std::fabs(own[picked[k]]);
            finite = finite && std::isfinite(sizes[k]);
        }
        std::vector<float> levels =
            finite ? fitted(sizes, rows.levels())
                   : std::vector<float>(rows.levels(), std::numeric_limits<float>::quiet_NaN());
        for (std::size_t i = 0; i < levels.size(); ++i) {
            const std::uint16_t level = to_bfloat16(levels[i]);
            std::memcpy(row + 2 * i, &level, sizeof level);
            levels[i] = of_bfloat16(level);
        }
        Bits bits(row + 2 * rows.levels());
        const std::size_t high = rows.kept * std::size_t(rows.low), codes = high + rows.high;
        for (std::size_t k = 0; k < rows.kept; ++k) {
            const auto place = std::uint32_t(picked[k]);
            bits.put(k * std::size_t(rows.low), place, rows.low);
            bits.put(high + (place >> rows.low) + k, 1, 1);
            const auto code = std::uint32_t(nearest(sizes[k], levels) << 1 | (own[place] < 0));
            bits.put(codes + k * std::size_t(rows.bits), code, rows.bits);
        }
    }
}

void topk_add(std::span<const std::uint8_t> data, Rows rows, std::span<float> out) {
    check(rows, out.size(), data.size());
    std::vector<float> levels(rows.levels());
    const std::uint8_t* row = data.data();
    for (std::size_t start = 0; start < out.size(); start += rows.length, row += rows.nbytes()) {
        float* const own = out.data() + start;
        bool finite = true;
        for (std::size_t i = 0; i < levels.size(); ++i) {
            std::uint16_t level;
            std::memcpy(&level, row + 2 * i, sizeof level);
            levels[i] = of_bfloat16(level);
            finite = finite && std::isfinite(levels[i]);
        }
        const std::span bits(row + 2 * rows.levels(), rows.nbytes() - 2 * rows.levels());
        const std::size_t high = rows.kept * std::size_t(rows.low), codes = high + rows.high;
        std::size_t place = 0, last = 0;
        for (std::size_t k = 0; k < rows.kept; ++k, ++place) {
            place = next_one(bits, high + place, codes) - high;
            const std::size_t index =
                ((place - k) << rows.low) | get(bits, k * std::size_t(rows.low), rows.low);
            if (place >= rows.high || index >= rows.length || (k && index <= last))
                refuse("a row names element ", index, " of ", rows.length, " out of order");
            last = index;
            const std::uint32_t code = get(bits, codes + k * std::size_t(rows.bits), rows.bits);
            own[index] += code & 1 ? -levels[code >> 1] : levels[code >> 1];
        }
        if (!finite) std::fill(own, own + rows.length, std::numeric_limits<float>::quiet_NaN());
    }
}

}  // namespace tacit
