// The table that each build of fewbits_kernels.cpp exports; fewbits.cpp checks sizes and picks one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tacit {

template <class Lane>
struct CodeKernels {
    void (*add_codes)(const std::uint8_t* index, std::size_t numel, int bits, const std::uint8_t* table,
                      bool add, Lane* lanes);
    void (*decode_votes)(const Lane* lanes, std::size_t numel, int times, int count, bool vote,
                         std::size_t block, const float* scales, float* out);
};

struct FewBitsKernels {
    const char* name;
    void (*block_sums)(const float* x, std::size_t numel, std::size_t block, int kind, double* out);
    void (*pack_signs)(const float* x, std::size_t numel, std::size_t block, int means, std::uint8_t* out);
    void (*unpack_signs)(const std::uint8_t* data, std::size_t numel, std::size_t block, int means,
                         float gain, bool add, float* out);
    void (*pack_two_bits)(const float* x, std::size_t numel, std::size_t block, std::uint8_t* out);
    void (*unpack_two_bits)(const std::uint8_t* data, std::size_t numel, std::size_t block, float gain,
                            bool add, float* out);
    void (*pack_levels)(const float* x, std::size_t numel, std::size_t block, int bits, int levels,
                        bool euclidean, std::uint64_t seed, std::uint8_t* out);
    void (*unpack_levels)(const std::uint8_t* data, std::size_t numel, std::size_t block, int bits,
                          float gain, bool add, float* out);
    void (*pack_ternary)(const float* x, std::size_t numel, std::size_t block, const float* limits,
                         const float* scales, std::uint64_t seed, std::uint8_t* out);
    void (*pack_natural)(const float* x, std::size_t numel, std::uint64_t seed, std::uint8_t* out);
    void (*unpack_natural)(const std::uint8_t* data, std::size_t numel, float gain, bool add, float* out);
    void (*pack_fp8)(const float* x, std::size_t numel, std::size_t block, int mantissa, bool stochastic,
                     std::uint64_t seed, std::uint8_t* out);
    void (*unpack_fp8)(const std::uint8_t* data, std::size_t numel, std::size_t block, int mantissa,
                       float gain, bool add, float* out);
    CodeKernels<std::uint8_t> lanes8;
    CodeKernels<std::uint16_t> lanes16;
    CodeKernels<std::int32_t> lanes32;
};

namespace baseline {
extern const FewBitsKernels fewbits_kernels;
}
namespace avx2 {
extern const FewBitsKernels fewbits_kernels;
}
namespace avx512 {
extern const FewBitsKernels fewbits_kernels;
}

}  // namespace tacit
