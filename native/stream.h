// The random bits of an element, by its index alone. For the files that CMake compiles once an instruction
// set: everything here has internal linkage, so that no build lends its code to another.
#pragma once

#include <cstdint>

namespace {

// Random bits for the elements from `first` on, which must not cross a multiple of 2^32.
// The mixer is "lowbias32" (C. Wellons, hash-prospector), on a counter: each element's bits stand alone.
struct Stream {
    static constexpr std::uint32_t golden = 0x9e3779b9u;
    std::uint32_t counter, key;

    Stream(std::uint64_t seed, std::uint64_t first)
        : counter(std::uint32_t(first) * golden + std::uint32_t(seed)),
          key(std::uint32_t(seed >> 32) ^ std::uint32_t(first >> 32)) {}

    std::uint32_t operator()(std::uint32_t k) const {
        std::uint32_t x = (counter + k * golden) ^ key;
        x ^= x >> 16;
        x *= 0x7feb352du;
        x ^= x >> 15;
        x *= 0x846ca68bu;
        x ^= x >> 16;
        return x;
    }
};

}  // namespace
