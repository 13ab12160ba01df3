#include "fewbits_bindings.h"

#include "arrays.h"
#include "fewbits.h"

namespace nb = nanobind;
using namespace nb::literals;
using tacit::Array;
using tacit::ConstLanes;
using tacit::Lanes;
using tacit::span;
using tacit::with_lanes;

namespace {

using Bytes = Array<std::uint8_t>;
using ConstBytes = Array<const std::uint8_t>;

void block_sums(Array<const float> x, std::size_t block, int kind, Array<double> out) {
    nb::gil_scoped_release unlocked;
    tacit::block_sums(span(x), block, kind, span(out));
}

void pack_signs(Array<const float> x, std::size_t block, int means, Bytes out) {
    nb::gil_scoped_release unlocked;
    tacit::pack_signs(span(x), block, means, span(out));
}

void unpack_signs(ConstBytes data, std::size_t block, int means, float gain, bool add, Array<float> out) {
    nb::gil_scoped_release unlocked;
    tacit::unpack_signs(span(data), block, means, gain, add, span(out));
}

void pack_two_bits(Array<const float> x, std::size_t block, Bytes out) {
    nb::gil_scoped_release unlocked;
    tacit::pack_two_bits(span(x), block, span(out));
}

void unpack_two_bits(ConstBytes data, std::size_t block, float gain, bool add, Array<float> out) {
    nb::gil_scoped_release unlocked;
    tacit::unpack_two_bits(span(data), block, gain, add, span(out));
}

void pack_levels(Array<const float> x, std::size_t block, int bits, int levels, bool euclidean,
                 std::uint64_t seed, Bytes out) {
    nb::gil_scoped_release unlocked;
    tacit::pack_levels(span(x), block, bits, levels, euclidean, seed, span(out));
}

void unpack_levels(ConstBytes data, std::size_t block, int bits, float gain, bool add, Array<float> out) {
    nb::gil_scoped_release unlocked;
    tacit::unpack_levels(span(data), block, bits, gain, add, span(out));
}

void pack_ternary(Array<const float> x, std::size_t block, Array<const float> limits,
                  Array<const float> scales, std::uint64_t seed, Bytes out) {
    nb::gil_scoped_release unlocked;
    tacit::pack_ternary(span(x), block, span(limits), span(scales), seed, span(out));
}

void add_codes(ConstBytes index, int bits, ConstBytes table, bool add, Lanes lanes) {
    with_lanes(lanes, [&](auto sums) { tacit::add_codes(span(index), bits, span(table), add, sums); });
}

void decode_votes(ConstLanes lanes, int times, int count, bool vote, std::size_t block,
                  Array<const float> scales, Array<float> out) {
    with_lanes(lanes, [&](auto sums) {
        tacit::decode_votes(sums, times, count, vote, block, span(scales), span(out));
    });
}

void pack_natural(Array<const float> x, std::uint64_t seed, Bytes out) {
    nb::gil_scoped_release unlocked;
    tacit::pack_natural(span(x), seed, span(out));
}

void unpack_natural(ConstBytes data, float gain, bool add, Array<float> out) {
    nb::gil_scoped_release unlocked;
    tacit::unpack_natural(span(data), gain, add, span(out));
}

void pack_fp8(Array<const float> x, std::size_t block, int mantissa, bool stochastic, std::uint64_t seed,
              Bytes out) {
    nb::gil_scoped_release unlocked;
    tacit::pack_fp8(span(x), block, mantissa, stochastic, seed, span(out));
}

void unpack_fp8(ConstBytes data, std::size_t block, int mantissa, float gain, bool add, Array<float> out) {
    nb::gil_scoped_release unlocked;
    tacit::unpack_fp8(span(data), block, mantissa, gain, add, span(out));
}

}  // namespace

#define FLOAT32S "torch.Tensor | numpy.typing.NDArray[numpy.float32]"
#define FLOAT64S "torch.Tensor | numpy.typing.NDArray[numpy.float64]"
#define BYTES "torch.Tensor | numpy.typing.NDArray[numpy.uint8]"
#define LANES "torch.Tensor | numpy.typing.NDArray[numpy.uint8 | numpy.uint16 | numpy.int32]"

void tacit::bind_fewbits(nb::module_& m) {
    m.def(
        "block_sums", &::block_sums, "x"_a.noconvert(), "block"_a, "kind"_a, "out"_a.noconvert(),
        nb::sig("def block_sums(x: " FLOAT32S ", block: int, kind: int, out: " FLOAT64S ") -> None"),
        "The sum of x (kind 0), |x| (1) or x^2 (2) over every block, in one order everywhere, or the largest "
        "|x| (3).");
    m.def("pack_signs", &::pack_signs, "x"_a.noconvert(), "block"_a, "means"_a, "out"_a.noconvert(),
          nb::sig("def pack_signs(x: " FLOAT32S ", block: int, means: int, out: " BYTES ") -> None"),
          "A bit an element, after 0, 1 or 2 means a block; see native/fewbits.h.");
    m.def("unpack_signs", &::unpack_signs, "data"_a.noconvert(), "block"_a, "means"_a, "gain"_a, "add"_a,
          "out"_a.noconvert(),
          nb::sig("def unpack_signs(data: " BYTES
                  ", block: int, means: int, gain: float, add: bool, out: " FLOAT32S ") -> None"),
          "out[i] = (out[i] if add else 0) + gain * decoded[i].");
    m.def("pack_two_bits", &::pack_two_bits, "x"_a.noconvert(), "block"_a, "out"_a.noconvert(),
          nb::sig("def pack_two_bits(x: " FLOAT32S ", block: int, out: " BYTES ") -> None"),
          "Sign and size in 2 bits, after the two mean sizes of a block; see native/fewbits.h.");
    m.def("unpack_two_bits", &::unpack_two_bits, "data"_a.noconvert(), "block"_a, "gain"_a, "add"_a,
          "out"_a.noconvert(),
          nb::sig("def unpack_two_bits(data: " BYTES ", block: int, gain: float, add: bool, out: " FLOAT32S
                  ") -> None"),
          "out[i] = (out[i] if add else 0) + gain * decoded[i].");
    m.def(
        "pack_levels", &::pack_levels, "x"_a.noconvert(), "block"_a, "bits"_a, "levels"_a, "euclidean"_a,
        "seed"_a, "out"_a.noconvert(),
        nb::sig("def pack_levels(x: " FLOAT32S
                ", block: int, bits: int, levels: int, euclidean: bool, seed: int, out: " BYTES ") -> None"),
        "QSGD's levels of the norm of a block, rounded without bias; see native/fewbits.h.");
    m.def("unpack_levels", &::unpack_levels, "data"_a.noconvert(), "block"_a, "bits"_a, "gain"_a, "add"_a,
          "out"_a.noconvert(),
          nb::sig("def unpack_levels(data: " BYTES
                  ", block: int, bits: int, gain: float, add: bool, out: " FLOAT32S ") -> None"),
          "out[i] = (out[i] if add else 0) + gain * decoded[i].");
    m.def("pack_ternary", &::pack_ternary, "x"_a.noconvert(), "block"_a, "limits"_a.noconvert(),
          "scales"_a.noconvert(), "seed"_a, "out"_a.noconvert(),
          nb::sig("def pack_ternary(x: " FLOAT32S ", block: int, limits: " FLOAT32S ", scales: " FLOAT32S
                  ", seed: int, out: " BYTES ") -> None"),
          "TernGrad's codes, 2 bits an element: 1 + the sign, or 1.");
    m.def("add_codes", &::add_codes, "index"_a.noconvert(), "bits"_a, "table"_a.noconvert(), "add"_a,
          "lanes"_a.noconvert(),
          nb::sig("def add_codes(index: " BYTES ", bits: int, table: " BYTES ", add: bool, lanes: " LANES
                  ") -> None"),
          "lanes[i] = (lanes[i] if add else 0) + table[code i], for codes of 1 or 2 bits.");
    m.def("decode_votes", &::decode_votes, "lanes"_a.noconvert(), "times"_a, "count"_a, "vote"_a, "block"_a,
          "scales"_a.noconvert(), "out"_a.noconvert(),
          nb::sig("def decode_votes(lanes: " LANES
                  ", times: int, count: int, vote: bool, block: int, scales: " FLOAT32S ", out: " FLOAT32S
                  ") -> None"),
          "out = scale * (times * lane - count), or, where `vote`, scale * count * the sign of that.");
    m.def("pack_natural", &::pack_natural, "x"_a.noconvert(), "seed"_a, "out"_a.noconvert(),
          nb::sig("def pack_natural(x: " FLOAT32S ", seed: int, out: " BYTES ") -> None"),
          "Stochastic powers of two, 9 bytes for 8 elements.");
    m.def("unpack_natural", &::unpack_natural, "data"_a.noconvert(), "gain"_a, "add"_a, "out"_a.noconvert(),
          nb::sig("def unpack_natural(data: " BYTES ", gain: float, add: bool, out: " FLOAT32S ") -> None"),
          "out[i] = (out[i] if add else 0) + gain * decoded[i].");
    m.def("pack_fp8", &::pack_fp8, "x"_a.noconvert(), "block"_a, "mantissa"_a, "stochastic"_a, "seed"_a,
          "out"_a.noconvert(),
          nb::sig("def pack_fp8(x: " FLOAT32S
                  ", block: int, mantissa: int, stochastic: bool, seed: int, out: " BYTES ") -> None"),
          "8-bit floats with a scale a block: `mantissa` 3 is e4m3, 2 is e5m2.");
    m.def("unpack_fp8", &::unpack_fp8, "data"_a.noconvert(), "block"_a, "mantissa"_a, "gain"_a, "add"_a,
          "out"_a.noconvert(),
          nb::sig("def unpack_fp8(data: " BYTES
                  ", block: int, mantissa: int, gain: float, add: bool, out: " FLOAT32S ") -> None"),
          "out[i] = (out[i] if add else 0) + gain * decoded[i].");
}
