#include "fewbits.h"

#include <bit>
#include <string>

#include "blocks.h"
#include "fewbits_kernels.h"
#include "refuse.h"

namespace tacit {
namespace {

using std::size_t;
using std::uint64_t;
using std::uint8_t;

static_assert(std::endian::native == std::endian::little, "heads and codes go to the wire as they lie");

constexpr size_t most_block = size_t(1) << 30;
constexpr size_t natural_block = 8;

// blocks.cpp picks the instruction set.
const FewBitsKernels& chosen() {
#ifdef TACIT_X86
    const std::string name = simd();
    if (name == avx512::fewbits_kernels.name) return avx512::fewbits_kernels;
    if (name == avx2::fewbits_kernels.name) return avx2::fewbits_kernels;
#endif
    return baseline::fewbits_kernels;
}

template <class Lane>
const CodeKernels<Lane>& chosen_for() {
    if constexpr (sizeof(Lane) == 1)
        return chosen().lanes8;
    else if constexpr (sizeof(Lane) == 2)
        return chosen().lanes16;
    else
        return chosen().lanes32;
}

void check_block(size_t block, size_t unit) {
    if (block < unit || block > most_block || block % unit)
        refuse("block=", block, ": a multiple of ", unit, " from ", unit, " to ", most_block);
}

size_t blocks_of(size_t numel, size_t block) { return numel / block + (numel % block != 0); }

// Bytes of records with `head` bytes and `bits` an element.
void check_nbytes(const char* name, size_t nbytes, size_t numel, size_t block, size_t head, int bits) {
    const auto record = [&](size_t n) { return head + (n * size_t(bits) + 7) / 8; };
    const size_t rest = numel % block;
    const size_t needed = numel / block * record(block) + (rest ? record(rest) : 0);
    if (nbytes != needed) refuse(name, " has ", nbytes, " bytes: ", numel, " elements take exactly ", needed);
}

void check_heads(const char* name, size_t size, size_t numel, size_t block) {
    if (size != blocks_of(numel, block))
        refuse(name, " has ", size, " elements: ", numel, " elements are ", blocks_of(numel, block),
               " blocks of ", block);
}

size_t signs_head(int means) {
    if (means < 0 || means > 2) refuse("means=", means, ": 0, 1 or 2");
    return sizeof(float) * size_t(means);
}

void check_level_bits(int bits) {
    if (bits != 2 && bits != 4 && bits != 8) refuse("bits=", bits, ": 2, 4 or 8");
}

void check_mantissa(int mantissa) {
    if (mantissa != 2 && mantissa != 3) refuse("mantissa=", mantissa, ": 3 (e4m3) or 2 (e5m2)");
}

}  // namespace

void block_sums(std::span<const float> x, size_t block, int kind, std::span<double> out) {
    check_block(block, 1);
    check_heads("out", out.size(), x.size(), block);
    if (kind < 0 || kind > 3) refuse("kind=", kind, ": 0 for x, 1 for |x|, 2 for x^2, 3 for the largest |x|");
    chosen().block_sums(x.data(), x.size(), block, kind, out.data());
}

void pack_signs(std::span<const float> x, size_t block, int means, std::span<uint8_t> out) {
    check_block(block, 8);
    check_nbytes("out", out.size(), x.size(), block, signs_head(means), 1);
    chosen().pack_signs(x.data(), x.size(), block, means, out.data());
}

void unpack_signs(std::span<const uint8_t> data, size_t block, int means, float gain, bool add,
                  std::span<float> out) {
    check_block(block, 8);
    check_nbytes("data", data.size(), out.size(), block, signs_head(means), 1);
    chosen().unpack_signs(data.data(), out.size(), block, means, gain, add, out.data());
}

void pack_two_bits(std::span<const float> x, size_t block, std::span<uint8_t> out) {
    check_block(block, 8);
    check_nbytes("out", out.size(), x.size(), block, 2 * sizeof(float), 2);
    chosen().pack_two_bits(x.data(), x.size(), block, out.data());
}

void unpack_two_bits(std::span<const uint8_t> data, size_t block, float gain, bool add,
                     std::span<float> out) {
    check_block(block, 8);
    check_nbytes("data", data.size(), out.size(), block, 2 * sizeof(float), 2);
    chosen().unpack_two_bits(data.data(), out.size(), block, gain, add, out.data());
}

void pack_levels(std::span<const float> x, size_t block, int bits, int levels, bool euclidean, uint64_t seed,
                 std::span<uint8_t> out) {
    check_level_bits(bits);
    check_block(block, 8);
    if (levels < 1 || levels >= 1 << (bits - 1))
        refuse("levels=", levels, ": 1 to ", (1 << (bits - 1)) - 1, " in ", bits, " bits");
    check_nbytes("out", out.size(), x.size(), block, sizeof(float), bits);
    chosen().pack_levels(x.data(), x.size(), block, bits, levels, euclidean, seed, out.data());
}

void unpack_levels(std::span<const uint8_t> data, size_t block, int bits, float gain, bool add,
                   std::span<float> out) {
    check_level_bits(bits);
    check_block(block, 8);
    check_nbytes("data", data.size(), out.size(), block, sizeof(float), bits);
    chosen().unpack_levels(data.data(), out.size(), block, bits, gain, add, out.data());
}

void pack_ternary(std::span<const float> x, size_t block, std::span<const float> limits,
                  std::span<const float> scales, uint64_t seed, std::span<uint8_t> out) {
    check_block(block, 1);
    check_heads("limits", limits.size(), x.size(), block);
    check_heads("scales", scales.size(), x.size(), block);
    check_nbytes("out", out.size(), x.size(), most_block, 0, 2);
    chosen().pack_ternary(x.data(), x.size(), block, limits.data(), scales.data(), seed, out.data());
}

template <class Lane>
void add_codes(std::span<const uint8_t> index, int bits, std::span<const uint8_t> table, bool add,
               std::span<Lane> lanes) {
    if (bits != 1 && bits != 2) refuse("bits=", bits, ": 1 or 2");
    if (table.size() != size_t(1) << bits)
        refuse("table has ", table.size(), " elements: codes of ", bits, " bits have ", 1 << bits);
    check_nbytes("index", index.size(), lanes.size(), most_block, 0, bits);
    chosen_for<Lane>().add_codes(index.data(), lanes.size(), bits, table.data(), add, lanes.data());
}

template <class Lane>
void decode_votes(std::span<const Lane> lanes, int times, int count, bool vote, size_t block,
                  std::span<const float> scales, std::span<float> out) {
    check_block(block, 1);
    check_heads("scales", scales.size(), out.size(), block);
    if (lanes.size() != out.size()) refuse("lanes has ", lanes.size(), " elements: out has ", out.size());
    chosen_for<Lane>().decode_votes(lanes.data(), out.size(), times, count, vote, block, scales.data(),
                                    out.data());
}

void pack_natural(std::span<const float> x, uint64_t seed, std::span<uint8_t> out) {
    check_nbytes("out", out.size(), x.size(), natural_block, 1, 8);
    chosen().pack_natural(x.data(), x.size(), seed, out.data());
}

void unpack_natural(std::span<const uint8_t> data, float gain, bool add, std::span<float> out) {
    check_nbytes("data", data.size(), out.size(), natural_block, 1, 8);
    chosen().unpack_natural(data.data(), out.size(), gain, add, out.data());
}

void pack_fp8(std::span<const float> x, size_t block, int mantissa, bool stochastic, uint64_t seed,
              std::span<uint8_t> out) {
    check_mantissa(mantissa);
    check_block(block, 1);
    check_nbytes("out", out.size(), x.size(), block, sizeof(float), 8);
    chosen().pack_fp8(x.data(), x.size(), block, mantissa, stochastic, seed, out.data());
}

void unpack_fp8(std::span<const uint8_t> data, size_t block, int mantissa, float gain, bool add,
                std::span<float> out) {
    check_mantissa(mantissa);
    check_block(block, 1);
    check_nbytes("data", data.size(), out.size(), block, sizeof(float), 8);
    chosen().unpack_fp8(data.data(), out.size(), block, mantissa, gain, add, out.data());
}

#define TACIT_LANES(Lane)                                                                                    \
    template void add_codes(std::span<const uint8_t>, int, std::span<const uint8_t>, bool, std::span<Lane>); \
    template void decode_votes(std::span<const Lane>, int, int, bool, size_t, std::span<const float>,        \
                               std::span<float>);
TACIT_LANES(uint8_t)
TACIT_LANES(std::uint16_t)
TACIT_LANES(std::int32_t)

}  // namespace tacit
