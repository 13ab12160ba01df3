// The table that each build of rotated_kernels.cpp exports; rotated.cpp takes the one blocks.cpp has picked.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tacit {

constexpr std::size_t hush_lanes = 8;  // floats a row: one SIMD register, each lane a block of its own
constexpr std::size_t hush_piece_rows = 1024;  // rows of the largest piece: 32 KB, the first cache
constexpr std::size_t hush_run_rows = 32;      // rows of a whole piece that lie near each other in the vector
// Pieces side by side that are read or written together: 256 bytes a row, 256 KB of tiles. Fewer wait longer
// for memory, more no longer fit into the second cache.
constexpr std::size_t hush_group = 8;
// Floats from one tile to the next: a piece, and a few lines more, lest equal rows share a set of the cache.
constexpr std::size_t hush_tile = hush_piece_rows * hush_lanes + 64;

struct HushEncoding {
    std::uint64_t sign_seed, dither_seed;
    std::uint32_t place;
    float half_scale;          // k_c = half_scale / norm_c
    float alpha_step, offset;  // dither = alpha_step * nibble + offset
    int granularity;
    const std::uint8_t* cell;  // of 64
};

struct HushDecoding {
    std::uint64_t sign_seed, dither_seed;
    const float* offsets;  // of 16
    float unit, gain;
};

// Pieces side by side: row k of piece s starts at base + starts[k / 32] + k % 32 * stride + 8 s.
template <class Float>
struct HushStrip {
    Float* base;
    const std::size_t* starts;
    std::size_t stride, count;
    std::size_t first_row, rows;  // of the first piece, in its tile
};

// Where values from the integer it stands for up to the next are rounded: to `base` or to `base + width`.
struct ThcCell {
    float base, width;  // neighbouring table values
    int lower;          // index of the lower
};

struct ThcEncoding {
    std::uint64_t sign_seed, round_seed;
    float t_p, scale;  // v = (clamped + t_p) * scale
    int bits, last_cell;
    const ThcCell* cells;
};

struct ThcDecoding {
    std::uint64_t sign_seed;
    float unit, half, gain;
};

// What depends on the type of a lane: uint8_t, uint16_t or int32_t.
template <class Lane>
struct LaneKernels {
    // All but the last two stages of one piece of `rows` rows from `first_row` on, left in `tile`. Meanwhile
    // a piece's worth of memory is called for, from `next` on, that will be written in a while; null if none.
    void (*hush_decode)(const Lane* lanes, std::size_t first_row, std::size_t rows, const float* norms,
                        const HushDecoding& how, const float* next, float* tile);
    // One block of `length` elements from `first` on, left in `block`: room for `length`, aligned to 64
    // bytes.
    void (*thc_decode)(const Lane* lanes, std::size_t first, std::size_t length, float factor,
                       const ThcDecoding& how, float* block);
    // `numel` elements from an even one on. Returns how many lanes met their limit.
    std::size_t (*add_table)(const std::uint8_t* index, std::size_t numel, const std::uint8_t* table,
                             Lane* lanes);
    void (*lookup_table)(const std::uint8_t* index, std::size_t numel, const std::uint8_t* table,
                         Lane* lanes);
};

struct RotatedKernels {
    const char* name;
    // 8 norms for each of at most 32 pieces, as wide as a window. `rows`: a power of two from 64 on.
    void (*hush_norms)(const HushStrip<const float>& strip, float* norms);
    // At most a group into their tiles, hush_tile floats from one to the next and aligned to 64 bytes: with
    // signs, and rotated by fours.
    void (*hush_gather)(const HushStrip<const float>& strip, std::uint64_t sign_seed, float* tiles);
    // Rotates on, and packs, one piece of `rows` rows from `first_row` on; `norms` and `out` are its own.
    // Meanwhile a piece's worth of memory is called for, from `next` on, that will be read; null if none.
    void (*hush_encode)(float* tile, std::size_t first_row, std::size_t rows, const float* norms,
                        const HushEncoding& how, const float* next, std::uint8_t* out);
    // At most a group from their tiles: with the last two stages, and signs.
    void (*hush_scatter)(float* tiles, const HushStrip<float>& strip, std::uint64_t sign_seed);
    // Signs, rotates and packs the block that lies in `block`, which it overwrites.
    void (*thc_encode)(float* block, std::size_t first, std::size_t length, float factor,
                       const ThcEncoding& how, std::uint8_t* out);
    LaneKernels<std::uint8_t> u8;
    LaneKernels<std::uint16_t> u16;
    LaneKernels<std::int32_t> i32;
};

namespace baseline {
extern const RotatedKernels rotated_kernels;
}
namespace avx2 {
extern const RotatedKernels rotated_kernels;
}
namespace avx512 {
extern const RotatedKernels rotated_kernels;
}

}  // namespace tacit
