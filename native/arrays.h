// Arrays of Python as spans, for the files that bind the core.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <span>
#include <type_traits>

namespace tacit {

// Any 1-D contiguous CPU array that speaks DLPack or the buffer protocol: torch, numpy, memoryview.
template <class T>
using Array = nanobind::ndarray<T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

template <class T>
std::span<T> span(const Array<T>& array) {
    return {array.data(), array.size()};
}

// Lanes come in three types: call(span of the right one).
using Lanes = nanobind::ndarray<nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using ConstLanes =
    nanobind::ndarray<nanobind::ro, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

template <class LaneArray, class Call>
auto with_lanes(const LaneArray& lanes, Call call) {
    const auto as = [&]<class T>(T) {
        using Lane = std::conditional_t<std::is_same_v<LaneArray, ConstLanes>, const T, T>;
        return std::span<Lane>(static_cast<Lane*>(lanes.data()), lanes.size());
    };
    const auto type = lanes.dtype();
    const bool u8 = type == nanobind::dtype<std::uint8_t>(), u16 = type == nanobind::dtype<std::uint16_t>();
    if (!u8 && !u16 && type != nanobind::dtype<std::int32_t>())
        throw nanobind::type_error("lanes are uint8, uint16 or int32");
    nanobind::gil_scoped_release unlocked;
    return u8 ? call(as(std::uint8_t())) : u16 ? call(as(std::uint16_t())) : call(as(std::int32_t()));
}

}  // namespace tacit
