// The table that each build of plane_kernels.cpp exports; plane.cpp takes the one blocks.cpp has picked.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tacit {

struct PlaneKernels {
    const char* name;
    // lanes += what lies in `payload`, at any address. Whether a lane met its limit: uint8_t and uint16_t
    // stop there, int32_t wraps, float has none.
    bool (*add_u8)(const std::uint8_t* payload, std::size_t numel, std::uint8_t* lanes);
    bool (*add_u16)(const std::uint8_t* payload, std::size_t numel, std::uint16_t* lanes);
    bool (*add_i32)(const std::uint8_t* payload, std::size_t numel, std::int32_t* lanes);
    bool (*add_f32)(const std::uint8_t* payload, std::size_t numel, float* lanes);
};

namespace baseline {
extern const PlaneKernels plane_kernels;
}
namespace avx2 {
extern const PlaneKernels plane_kernels;
}
namespace avx512 {
extern const PlaneKernels plane_kernels;
}

}  // namespace tacit
