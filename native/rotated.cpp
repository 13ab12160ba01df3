#include "rotated.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "blocks.h"
#include "refuse.h"
#include "rotated_kernels.h"
#include "workers.h"

namespace tacit {
namespace {

using std::size_t;

constexpr size_t most_numel = size_t(1) << 60;  // no size below overflows under it
constexpr size_t smallest_piece_rows = 64;
constexpr size_t whole_rows = 8192;   // a longer vector is padded to whole pieces
constexpr size_t window_pieces = 32;  // pieces that sample the same megabyte: it stays in the cache meanwhile
constexpr size_t runs = hush_piece_rows / hush_run_rows;  // that a vector is cut into
constexpr size_t adder_share = size_t(1) << 16;           // elements: even, and worth a thread's while

void check_between(const char* name, long long value, long long least, long long most) {
    if (value < least || value > most) refuse(name, "=", value, ": from ", least, " to ", most);
}

void check_positive(const char* name, double value) {
    if (!(value > 0 && std::isfinite(value))) refuse(name, "=", value, ": above 0, and finite");
}

void check_size(const char* name, size_t size, size_t needed, size_t numel) {
    if (size != needed) refuse(name, " has ", size, " entries: ", numel, " elements take exactly ", needed);
}

void check_table(const char* name, size_t size, size_t needed) {
    if (size != needed) refuse(name, " has ", size, " entries: exactly ", needed, " are used");
}

void check_numel(size_t numel) {
    if (numel > most_numel) refuse("numel=", numel, ": at most ", most_numel);
}

// blocks.cpp picks the instruction set.
const RotatedKernels& chosen() {
#ifdef TACIT_X86
    const std::string name = simd();
    if (name == avx512::rotated_kernels.name) return avx512::rotated_kernels;
    if (name == avx2::rotated_kernels.name) return avx2::rotated_kernels;
#endif
    return baseline::rotated_kernels;
}

template <class Lane>
const LaneKernels<Lane>& chosen_for() {
    if constexpr (std::is_same_v<Lane, std::uint8_t>)
        return chosen().u8;
    else if constexpr (std::is_same_v<Lane, std::uint16_t>)
        return chosen().u16;
    else
        return chosen().i32;
}

size_t workers_for(size_t units, int threads) {
    check_between("threads", threads, 1, 1024);
    return std::clamp<size_t>(units, 1, size_t(threads));
}

// ---- magnitudes

// Kernels square, add and divide in float. A norm beyond these limits, and the block under it, are taken
// times a power of two that brings them near 1: exact, so the bits of ordinary gradients do not depend on it.
constexpr double least_ordinary = 0x1p-40, most_ordinary = 0x1p60;

bool ordinary(double norm) { return norm >= least_ordinary && norm <= most_ordinary; }

// The power of two to divide `norm` by: 1 if it is ordinary, 0 or not finite.
double unit_of(double norm) {
    if (ordinary(norm) || norm == 0 || !std::isfinite(norm)) return 1;
    return std::ldexp(1.0, std::clamp(std::ilogb(norm), -100, 100));
}

// ---- hush

// Pieces side by side: their rows lie in 32 runs of equal length, each `stride` from the last.
struct Group {
    size_t piece, count;     // the first, and how many
    size_t first_row, rows;  // of the first
    size_t stride;
    std::array<size_t, runs> starts;  // elements

    size_t row(size_t s) const { return first_row + s * rows; }
    size_t width() const { return count * hush_lanes; }
    bool within(size_t numel) const { return starts.back() + (rows / runs - 1) * stride + width() <= numel; }
    // Its rows follow each other: the only piece, or window, of a vector.
    bool together() const {
        return stride == width() && starts.back() == starts[0] + (runs - 1) * (rows / runs) * stride;
    }
    // Kernels find its rows where they lie: all there, and whole runs of them.
    bool in_place(size_t numel) const { return within(numel) && (rows == hush_piece_rows || together()); }

    // visit(first element, elements that are there, elements in all) for rows, as many at once as lie
    // together.
    template <class Visit>
    void each_stretch(size_t numel, Visit visit) const {
        const size_t share = rows / runs * stride;
        const size_t length = stride == width() ? share : width();
        for (const size_t start : starts)
            for (size_t at = start; at < start + share; at += std::max(stride, length)) {
                const size_t first = std::min(at, numel);
                visit(first, std::min(length, numel - first), length);
            }
    }
};

// The norms of a group as kernels take them, and what they were divided by.
struct Norms {
    alignas(64) float scaled[hush_group * hush_lanes];
    float units[hush_group * hush_lanes];
    bool plain = true;  // all units are 1

    Norms(std::span<const double> all, const Group& group) {
        for (size_t i = 0; i < group.width(); ++i) {
            const double norm = all[group.piece * hush_lanes + i], unit = unit_of(norm);
            scaled[i] = float(norm / unit);
            units[i] = float(unit);
            plain &= unit == 1;
        }
    }
};

// A worker's own half megabyte; `floats` stay in the second cache. On the stack, not on the heap, where each
// call would fault its pages in again.
struct Tiles {
    alignas(64) float floats[hush_group * hush_tile];
    alignas(64) float apart[hush_group * hush_piece_rows * hush_lanes];  // a group, row after row
    size_t starts[runs];

    float* operator[](size_t s) { return floats + s * hush_tile; }

    // A group whose rows follow each other from `base` on.
    template <class Float>
    HushStrip<Float> strip(Float* base, const Group& group) {
        for (size_t t = 0; t < runs; ++t) starts[t] = t * hush_run_rows * group.width();
        return {base, starts, group.width(), group.count, group.first_row, group.rows};
    }
    // A group where it lies.
    template <class Float>
    HushStrip<Float> in_place(Float* vector, const Group& group) {
        if (group.together()) return strip(vector + group.starts[0], group);
        return {vector, group.starts.data(), group.stride, group.count, group.first_row, group.rows};
    }
    // A copy of a group, with zeros after the last element.
    HushStrip<const float> copied(std::span<const float> x, const Group& group) {
        float* to = apart;
        group.each_stretch(x.size(), [&](size_t first, size_t present, size_t length) {
            std::fill_n(std::copy_n(x.data() + first, present, to), length - present, 0.0f);
            to += length;
        });
        return strip<const float>(apart, group);
    }
    HushStrip<const float> padded(std::span<const float> x, const Group& group) {
        return group.in_place(x.size()) ? in_place(x.data(), group) : copied(x, group);
    }

    // change(element, unit of its block) for all that lies in `apart`.
    template <class Change>
    void scale(const Group& group, const float* units, Change change) {
        for (size_t k = 0; k < group.rows; ++k)
            for (size_t i = 0; i < group.width(); ++i) {
                float& v = apart[k * group.width() + i];
                v = change(v, units[i]);
            }
    }
};

struct Pieces {
    size_t numel, rows, whole;  // `whole`: pieces of full size
    size_t full, turn;          // windows of 32 pieces, and how far they turn from one run to the next

    explicit Pieces(size_t elements) : numel(elements) {
        check_numel(numel);
        rows = (numel + hush_lanes - 1) / hush_lanes;
        // Beside many whole pieces, a last one that is padded costs little and samples the vector as they do.
        const size_t step = rows > whole_rows ? hush_piece_rows : smallest_piece_rows;
        rows = (rows + step - 1) / step * step;
        whole = rows / hush_piece_rows;
        full = whole / window_pieces;
        turn = full / runs | 1;
    }

    size_t count() const { return whole + size_t(std::popcount(rows % hush_piece_rows)); }
    size_t padded() const { return rows * hush_lanes; }

    size_t groups() const { return (whole + hush_group - 1) / hush_group + count() - whole; }
    size_t windows() const { return (whole + window_pieces - 1) / window_pieces; }

    // The first element of run t of the window, or the smaller piece, whose first row is `first_row`.
    size_t start(size_t first_row, size_t t) const {
        const size_t window = first_row / (window_pieces * hush_piece_rows);
        if (window < full) first_row = (window + t * turn) % full * window_pieces * hush_piece_rows;
        return (t * rows + first_row) / runs * hush_lanes;
    }

    // As much as a piece of `data`, of the window after or before: it is needed soon. Null beyond the ends.
    const float* a_window_later(size_t piece, const float* data) const {
        return a_run_of(piece / window_pieces + 1, piece, data);
    }
    const float* a_window_earlier(size_t piece, const float* data) const {
        return piece < window_pieces ? nullptr : a_run_of(piece / window_pieces - 1, piece, data);
    }
    const float* a_run_of(size_t window, size_t piece, const float* data) const {
        if (window >= full) return nullptr;
        const size_t first = start(window * window_pieces * hush_piece_rows, piece % window_pieces);
        return first + hush_piece_rows * hush_lanes <= numel ? data + first : nullptr;
    }

    // Whole pieces [from, to) of one window, side by side.
    Group side_by_side(size_t from, size_t to) const {
        const size_t first = from / window_pieces * window_pieces;
        const size_t stride = std::min(window_pieces, whole - first) * hush_lanes;
        Group group{from, to - from, from * hush_piece_rows, hush_piece_rows, stride, {}};
        for (size_t t = 0; t < runs; ++t)
            group.starts[t] = start(first * hush_piece_rows, t) + (from - first) * hush_lanes;
        return group;
    }
    Group window(size_t w) const {
        return side_by_side(w * window_pieces, std::min(whole, (w + 1) * window_pieces));
    }

    // visit(group) for the groups of [begin, end): whole pieces side by side, then the others one by one.
    template <class Visit>
    void each(size_t begin, size_t end, Visit visit) const {
        const size_t wide = groups() - (count() - whole);
        for (size_t group = begin; group < std::min(end, wide); ++group)
            visit(side_by_side(group * hush_group, std::min(whole, (group + 1) * hush_group)));
        for (size_t group = wide, first = whole * hush_piece_rows, size; group < end;
             ++group, first += size) {
            size = std::bit_floor(rows - first);
            if (group >= begin) visit(smaller(whole + group - wide, first, size));
        }
    }
    Group smaller(size_t piece, size_t first_row, size_t size) const {
        Group group{piece, 1, first_row, size, hush_lanes, {}};
        for (size_t t = 0; t < runs; ++t) group.starts[t] = start(first_row, t);
        return group;
    }
};

void check(const Hush& hush, int most_granularity) {
    check_positive("range", hush.range);
    check_between("granularity", hush.granularity, 1, most_granularity);
}

// ---- thc

struct Slices {
    size_t numel, padded, slice, block;

    Slices(size_t elements, int slice_log2, int block_log2) : numel(elements) {
        check_numel(numel);
        check_between("slice_log2", slice_log2, 3, 30);
        check_between("block_log2", block_log2, 3, 20);
        slice = size_t(1) << slice_log2;
        block = std::min(size_t(1) << block_log2, slice);
        const size_t rest = numel % slice;
        padded = numel - rest + (rest ? std::max<size_t>(8, std::bit_ceil(rest)) : 0);
    }
    Slices(size_t elements, const Thc& thc) : Slices(elements, thc.slice_log2, thc.block_log2) {
        check_positive("t_p", thc.t_p);
    }

    size_t count() const { return (numel + slice - 1) / slice; }
    // The last slice is a whole number of blocks, or one short block.
    size_t blocks() const { return (padded + block - 1) / block; }
    size_t step() const { return std::max<size_t>(1, (size_t(1) << 16) / block); }  // worth a thread's while

    // visit(slice, its padded length, first element, padded length, elements that are there) for blocks
    // [begin, end).
    template <class Visit>
    void each_block(size_t begin, size_t end, Visit visit) const {
        for (size_t first = begin * block; begin < end; ++begin, first += block) {
            const size_t in = first / slice, length = std::min(block, padded - first);
            const size_t present = first < numel ? std::min(length, numel - first) : 0;
            visit(in, std::min(slice, padded - in * slice), first, length, present);
        }
    }
};

// Room for one block a worker, made before any thread starts.
struct Scratch {
    struct alignas(64) Line {
        float floats[16];
    };
    size_t lines;
    std::unique_ptr<Line[]> all;

    Scratch(size_t block, size_t workers)
        : lines((block + 15) / 16), all(std::make_unique_for_overwrite<Line[]>(lines * workers)) {}
    float* of(size_t worker) { return all[worker * lines].floats; }
};

}  // namespace

size_t hush_padded(size_t numel) { return Pieces(numel).padded(); }

size_t hush_blocks(size_t numel) { return Pieces(numel).count() * hush_lanes; }

namespace {

// The norms of piece s of a group, summed in double.
std::array<double, hush_lanes> wide_norms(std::span<const float> x, const Group& group, size_t s) {
    std::array<double, hush_lanes> sums{};
    for (const size_t start : group.starts)
        for (size_t k = 0; k < group.rows / runs; ++k) {
            const size_t first = std::min(start + k * group.stride + s * hush_lanes, x.size());
            const size_t present = std::min(hush_lanes, x.size() - first);
            for (size_t c = 0; c < present; ++c) sums[c] += double(x[first + c]) * x[first + c];
        }
    for (double& sum : sums) sum = std::sqrt(sum);
    return sums;
}

}  // namespace

void hush_norms(std::span<const float> x, std::span<double> out, int threads) {
    const Pieces pieces(x.size());
    check_size("out", out.size(), hush_blocks(x.size()), x.size());
    const auto& kernels = chosen();
    const size_t wide = pieces.groups() - (pieces.count() - pieces.whole);
    const auto norms_of = [&](Tiles& tiles, const Group& group) {
        float found[window_pieces * hush_lanes];
        kernels.hush_norms(tiles.padded(x, group), found);
        for (size_t s = 0; s < group.count; ++s) {
            const float* norms = found + s * hush_lanes;
            double* to = out.data() + (group.piece + s) * hush_lanes;
            std::copy_n(norms, hush_lanes, to);
            if (std::all_of(norms, norms + hush_lanes, ordinary)) continue;
            const auto exact = wide_norms(x, group, s);  // squares may have overflown, or vanished
            for (size_t c = 0; c < hush_lanes; ++c)
                if (!ordinary(norms[c])) to[c] = exact[c];
        }
    };
    share_out(pieces.windows(), 1, workers_for(pieces.windows(), threads),
              [&](size_t, size_t begin, size_t end) {
                  Tiles tiles;
                  for (size_t w = begin; w < end; ++w) {
                      const Group window = pieces.window(w);
                      if (window.within(x.size())) {  // as one, because memory likes long rows
                          norms_of(tiles, window);
                          continue;
                      }
                      const size_t first = window.piece / hush_group;
                      const size_t last = first + (window.count + hush_group - 1) / hush_group;
                      pieces.each(first, last, [&](const Group& group) { norms_of(tiles, group); });
                  }
              });
    Tiles tiles;
    pieces.each(wide, pieces.groups(), [&](const Group& group) { norms_of(tiles, group); });
}

void hush_encode(std::span<const float> x, std::span<const double> norms, const Hush& hush, int place,
                 double alpha, std::span<const std::uint8_t> cell, std::span<std::uint8_t> out, int threads) {
    const Pieces pieces(x.size());
    check(hush, 31);  // 2 * 31 is the last of 64 cells
    check_between("place", place, 0, 15);
    if (!std::isfinite(alpha)) refuse("alpha=", alpha, ": must be finite");
    check_size("norms", norms.size(), hush_blocks(x.size()), x.size());
    check_size("out", out.size(), pieces.padded() / 2, x.size());
    check_table("cell", cell.size(), 64);
    for (const int index : cell) check_between("cell", index, 0, 15);
    const int g = hush.granularity;
    const HushEncoding how{hush.sign_seed,
                           hush.dither_seed,
                           std::uint32_t(place),
                           float(g / (2.0 * hush.range)),
                           float(alpha / 16.0),
                           float(g / 2.0 - alpha * 7.5 / 16.0),
                           g,
                           cell.data()};
    const auto& kernels = chosen();
    const auto encode = [&](Tiles& tiles, const Group& group) {
        const Norms own(norms, group);
        const auto strip = own.plain ? tiles.padded(x, group) : tiles.copied(x, group);
        if (!own.plain) tiles.scale(group, own.units, [](float v, float unit) { return v / unit; });
        kernels.hush_gather(strip, how.sign_seed, tiles[0]);
        for (size_t s = 0; s < group.count; ++s)
            kernels.hush_encode(tiles[s], group.row(s), group.rows, own.scaled + s * hush_lanes, how,
                                pieces.a_window_earlier(group.piece + s, x.data()),
                                out.data() + group.row(s) * hush_lanes / 2);
    };
    // From the end: that is what the norms have left in the cache.
    const size_t groups = pieces.groups();
    share_out(groups, 1, workers_for(groups, threads), [&](size_t, size_t begin, size_t end) {
        Tiles tiles;
        for (size_t after = groups - begin; after > groups - end; --after)
            pieces.each(after - 1, after, [&](const Group& group) { encode(tiles, group); });
    });
}

template <class Lane>
void hush_decode(std::span<const Lane> lanes, std::span<const double> norms, const Hush& hush,
                 std::span<const float> offsets, float gain, std::span<float> out, int threads) {
    const Pieces pieces(out.size());
    check(hush, 63);
    check_size("norms", norms.size(), hush_blocks(out.size()), out.size());
    check_size("lanes", lanes.size(), pieces.padded(), out.size());
    check_table("offsets", offsets.size(), 16);
    const HushDecoding how{hush.sign_seed, hush.dither_seed, offsets.data(),
                           float(2.0 * hush.range / hush.granularity), gain};
    const auto& kernels = chosen_for<Lane>();
    const auto& common = chosen();
    const size_t groups = pieces.groups();
    share_out(groups, 1, workers_for(groups, threads), [&](size_t, size_t begin, size_t end) {
        Tiles tiles;
        pieces.each(begin, end, [&](const Group& group) {
            const Norms own(norms, group);
            for (size_t s = 0; s < group.count; ++s)
                kernels.hush_decode(lanes.data() + group.row(s) * hush_lanes, group.row(s), group.rows,
                                    own.scaled + s * hush_lanes, how,
                                    pieces.a_window_later(group.piece + s, out.data()), tiles[s]);
            if (own.plain && group.in_place(out.size()))
                return common.hush_scatter(tiles[0], tiles.in_place(out.data(), group), how.sign_seed);
            common.hush_scatter(tiles[0], tiles.strip<float>(tiles.apart, group), how.sign_seed);
            if (!own.plain) tiles.scale(group, own.units, [](float v, float unit) { return v * unit; });
            const float* from = tiles.apart;
            group.each_stretch(out.size(), [&](size_t first, size_t present, size_t length) {
                std::copy_n(from, present, out.data() + first);
                from += length;
            });
        });
    });
}

namespace {

// work(first, n) over shares of an even number of elements.
template <class Work>
void over_indices(std::span<const std::uint8_t> index, std::span<const std::uint8_t> table, size_t numel,
                  int threads, Work work) {
    check_numel(numel);
    check_size("index", index.size(), (numel + 1) / 2, numel);
    check_table("table", table.size(), 16);
    const size_t shares = (numel + adder_share - 1) / adder_share;
    share_out(shares, 1, workers_for(shares, threads), [&](size_t, size_t begin, size_t end) {
        const size_t first = begin * adder_share;
        work(first, std::min(end * adder_share, numel) - std::min(first, numel));
    });
}

}  // namespace

template <class Lane>
size_t add_table(std::span<const std::uint8_t> index, std::span<const std::uint8_t> table,
                 std::span<Lane> lanes, int threads) {
    std::atomic<size_t> saturated = 0;
    const auto& kernels = chosen_for<Lane>();
    over_indices(index, table, lanes.size(), threads, [&](size_t first, size_t n) {
        saturated += kernels.add_table(index.data() + first / 2, n, table.data(), lanes.data() + first);
    });
    return saturated;
}

template <class Lane>
void lookup_table(std::span<const std::uint8_t> index, std::span<const std::uint8_t> table,
                  std::span<Lane> lanes, int threads) {
    const auto& kernels = chosen_for<Lane>();
    over_indices(index, table, lanes.size(), threads, [&](size_t first, size_t n) {
        kernels.lookup_table(index.data() + first / 2, n, table.data(), lanes.data() + first);
    });
}

size_t thc_padded(size_t numel, int slice_log2) { return Slices(numel, slice_log2, 3).padded; }

void thc_encode(std::span<const float> x, std::span<const double> norms, const Thc& thc,
                std::uint64_t round_seed, std::span<const std::uint8_t> table, int bits,
                std::span<std::uint8_t> out, int threads) {
    const Slices slices(x.size(), thc);
    check_between("bits", bits, 2, 4);
    check_table("table", table.size(), size_t(1) << bits);
    for (size_t i = 0; i < table.size(); ++i)
        if (i ? table[i] <= table[i - 1] : table[i] != 0)
            refuse("table[", i, "]=", int(table[i]), ": values rise from 0");
    const size_t a_byte = bits == 2 ? 4 : 2;
    check_size("norms", norms.size(), slices.count(), x.size());
    check_size("out", out.size(), slices.padded / a_byte, x.size());

    const int g = table.back();
    std::vector<ThcCell> cells;  // for each integer below g
    for (int lower = 0; lower + 1 < int(table.size()); ++lower)
        cells.resize(table[lower + 1],
                     ThcCell{float(table[lower]), float(table[lower + 1] - table[lower]), lower});
    const ThcEncoding how{thc.sign_seed, round_seed, float(thc.t_p), float(g / (2.0 * thc.t_p)),
                          bits,          g - 1,      cells.data()};
    const auto& kernels = chosen();
    const size_t workers = workers_for(slices.blocks(), threads);
    Scratch scratch(slices.block, workers);
    share_out(slices.blocks(), slices.step(), workers, [&](size_t worker, size_t begin, size_t end) {
        float* block = scratch.of(worker);
        slices.each_block(begin, end, [&](size_t in, size_t d, size_t first, size_t length, size_t present) {
            const double unit = unit_of(norms[in]), norm = norms[in] / unit;
            const bool usable = norm > 0 && std::isfinite(norm);
            const double factor = usable ? std::sqrt(double(d)) / (std::sqrt(double(length)) * norm) : 0;
            if (present) std::memcpy(block, x.data() + first, present * sizeof(float));
            if (unit != 1)
                for (size_t k = 0; k < present; ++k) block[k] /= float(unit);
            std::fill(block + present, block + length, 0.0f);
            kernels.thc_encode(block, first, length, float(factor), how, out.data() + first / a_byte);
        });
    });
}

template <class Lane>
void thc_decode(std::span<const Lane> lanes, std::span<const double> norms, const Thc& thc, int granularity,
                int count, float gain, std::span<float> out, int threads) {
    const Slices slices(out.size(), thc);
    check_between("granularity", granularity, 1, 255);
    check_between("count", count, 1, std::numeric_limits<int>::max());
    check_size("norms", norms.size(), slices.count(), out.size());
    check_size("lanes", lanes.size(), slices.padded, out.size());
    const ThcDecoding how{thc.sign_seed, float(2.0 * thc.t_p / (double(granularity) * count)), float(thc.t_p),
                          gain};
    const auto& kernels = chosen_for<Lane>();
    const size_t workers = workers_for(slices.blocks(), threads);
    Scratch scratch(slices.block, workers);
    share_out(slices.blocks(), slices.step(), workers, [&](size_t worker, size_t begin, size_t end) {
        float* block = scratch.of(worker);
        slices.each_block(begin, end, [&](size_t in, size_t d, size_t first, size_t length, size_t present) {
            const double unit = unit_of(norms[in]), norm = norms[in] / unit;
            const double factor = std::isfinite(norm) ? norm / std::sqrt(double(d) * double(length)) : NAN;
            kernels.thc_decode(lanes.data() + first, first, length, float(factor), how, block);
            if (unit != 1)
                for (size_t k = 0; k < present; ++k) block[k] *= float(unit);
            if (present) std::memcpy(out.data() + first, block, present * sizeof(float));
        });
    });
}

#define TACIT_LANE(Lane)                                                                                     \
    template void hush_decode(std::span<const Lane>, std::span<const double>, const Hush&,                   \
                              std::span<const float>, float, std::span<float>, int);                         \
    template size_t add_table(std::span<const std::uint8_t>, std::span<const std::uint8_t>, std::span<Lane>, \
                              int);                                                                          \
    template void lookup_table(std::span<const std::uint8_t>, std::span<const std::uint8_t>,                 \
                               std::span<Lane>, int);                                                        \
    template void thc_decode(std::span<const Lane>, std::span<const double>, const Thc&, int, int, float,    \
                             std::span<float>, int);
TACIT_LANE(std::uint8_t)
TACIT_LANE(std::uint16_t)
TACIT_LANE(std::int32_t)

}  // namespace tacit
