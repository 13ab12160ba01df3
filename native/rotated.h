// Two codecs that rotate before they round to 4 bits, so that the indices of all ranks can be looked up in
// one table and added as integers: hush, and thc as published (arXiv 2302.08545).
//
// Random bits are r(seed, i) of random_bits(): the sign of element e flips if bit (e & 31) of r(sign_seed, e
// >> 5) is set; its dither nibble is nibble (e & 7) of r(dither_seed, e >> 3); its uniform, r(seed, e) >> 8
// in 2^-24.
//
// hush: elements lie in rows of 8, zeros added up to a multiple of 64 rows, or of 1024 beyond 8192 rows. The
// rows are dealt to pieces: 1024 rows while they last, then 512, 256, 128, 64, each at most once. Column c of
// piece p is block 8 p + c, and rotates alone. The vector is cut into 32 runs of equal length, and a piece
// takes a 32nd of its rows from each, so that every block samples all of the vector. Whole pieces take them
// side by side, a window of 32 at a time (the last window may have fewer): in a window of P pieces, row j of
// piece s is the 8 elements from 8 (P j + s) of the window's share on. In run t lie the shares of the W full
// windows, beginning with that of window -t (W / 32 | 1) mod W, lest a window meet the same part of every
// layer; then that of the last window; then those of the smaller pieces. Lanes, indices, norms and random
// bits go piece by piece, so `e` above is 8192 s + 8 k + c. thc: elements lie in slices of 2^slice_log2, the
// last padded with zeros to a power of two, at least 8. Blocks of 2^block_log2 elements that lie together (a
// whole slice if it is shorter) rotate alone; a slice has one norm.
//
// Lanes are sums over ranks, one an element: uint8_t, uint16_t or int32_t. Every function checks the sizes it
// is given (std::invalid_argument), and gives the same bits for any number of `threads`; 1 is the calling
// thread alone. Norms are doubles: those of the largest floats do not fit into a float.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tacit {

std::size_t hush_padded(std::size_t numel);  // elements once padded
std::size_t hush_blocks(std::size_t numel);  // norms: 8 a piece

// The Euclidean norm of each block; not finite if the block is not.
void hush_norms(std::span<const float> x, std::span<double> out, int threads);

// What all ranks agree on beside the norms.
struct Hush {
    std::uint64_t sign_seed, dither_seed;
    double range;     // the lattice spans [-range, range] in standard deviations of a rotated block
    int granularity;  // steps in it: 1 to 31 to encode, to 63 to decode
};

// 4-bit indices, two a byte, the even element in the low nibble: cell[floor(2 v)] with
// v = granularity / 2 + rotated / step + alpha * (((nibble + place) & 15) - 7.5) / 16, floor(2 v) clamped to
// [0, 2 granularity]. A block whose norm is 0 or not finite is encoded as if it were zero (or, where it holds
// NaN, as cell[0]).
void hush_encode(std::span<const float> x, std::span<const double> norms, const Hush& hush, int place,
                 double alpha, std::span<const std::uint8_t> cell, std::span<std::uint8_t> out, int threads);

// out = gain * the rotation undone of (lane + offsets[nibble]) * step. A block whose norm is not finite is
// NaN.
template <class Lane>
void hush_decode(std::span<const Lane> lanes, std::span<const double> norms, const Hush& hush,
                 std::span<const float> offsets, float gain, std::span<float> out, int threads);

// lanes[e] += table[index e], saturating. Returns how many lanes would have passed the limit of their type.
template <class Lane>
std::size_t add_table(std::span<const std::uint8_t> index, std::span<const std::uint8_t> table,
                      std::span<Lane> lanes, int threads);

// lanes[e] = table[index e].
template <class Lane>
void lookup_table(std::span<const std::uint8_t> index, std::span<const std::uint8_t> table,
                  std::span<Lane> lanes, int threads);

struct Thc {
    int slice_log2, block_log2;  // 3 to 30, 3 to 20
    std::uint64_t sign_seed;
    double t_p;  // a rotated element is clamped to t_p standard deviations
};

std::size_t thc_padded(std::size_t numel, int slice_log2);

// Indices of `bits` bits, rounded stochastically to neighbours in `table`, of 2^bits rising values from 0 on.
// 4 and 3 bits take a nibble, 2 bits a quarter of a byte; low bits first.
void thc_encode(std::span<const float> x, std::span<const double> norms, const Thc& thc,
                std::uint64_t round_seed, std::span<const std::uint8_t> table, int bits,
                std::span<std::uint8_t> out, int threads);

// The mean of the `count` ranks whose table values add up to `lanes`, times `gain`. `granularity` is the
// largest value in the table. A slice whose norm is not finite is NaN.
template <class Lane>
void thc_decode(std::span<const Lane> lanes, std::span<const double> norms, const Thc& thc, int granularity,
                int count, float gain, std::span<float> out, int threads);

}  // namespace tacit
