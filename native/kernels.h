// The table that each build of kernels.cpp exports; blocks.cpp picks one at run time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tacit {

struct Kernels {
    const char* name;
    std::size_t (*pack8)(const float* x, std::size_t numel, std::size_t block, std::uint64_t seed,
                         bool stochastic, std::uint8_t* out);
    std::size_t (*pack4)(const float* x, std::size_t numel, std::size_t block, std::uint64_t seed,
                         bool stochastic, std::uint8_t* out);
    void (*unpack8)(const std::uint8_t* data, std::size_t numel, std::size_t block, float gain, bool add,
                    float* out);
    void (*unpack4)(const std::uint8_t* data, std::size_t numel, std::size_t block, float gain, bool add,
                    float* out);
    void (*random_bits)(std::uint64_t seed, std::size_t numel, std::uint32_t* out);
    double (*keep)(const float* x, const float* reference, std::size_t numel, float* out);
    bool (*mean)(const float* total, std::size_t numel, float count, float* out);
    bool (*mean_bf16)(const std::uint16_t* total, std::size_t numel, float count, float* out);
};

namespace baseline {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}

}  // namespace tacit
