#include "sparse_bindings.h"

#include <cstddef>
#include <cstdint>

#include "arrays.h"
#include "sparse_select.h"

namespace nb = nanobind;
using namespace nb::literals;
using tacit::Array;
using tacit::span;

namespace {

void select_largest(Array<const float> x, std::size_t length, std::size_t kept, Array<std::int64_t> out) {
    nb::gil_scoped_release unlocked;
    tacit::select_largest(span(x), length, kept, span(out));
}

std::size_t count_above(Array<const float> x, float least) {
    nb::gil_scoped_release unlocked;
    return tacit::count_above(span(x), least);
}

void select_above(Array<const float> x, float least, Array<std::int64_t> out) {
    nb::gil_scoped_release unlocked;
    tacit::select_above(span(x), least, span(out));
}

void used_blocks(Array<const float> x, std::size_t block, Array<std::uint8_t> out) {
    nb::gil_scoped_release unlocked;
    tacit::used_blocks(span(x), block, span(out));
}

void accumulate(Array<const float> x, float momentum, Array<float> u, Array<float> v, Array<float> wanted) {
    nb::gil_scoped_release unlocked;
    tacit::accumulate(span(x), momentum, span(u), span(v), span(wanted));
}

void pack_places(Array<const std::int64_t> places, std::size_t length, int low, Array<std::uint8_t> out) {
    nb::gil_scoped_release unlocked;
    tacit::pack_places(span(places), length, low, span(out));
}

void unpack_places(Array<const std::uint8_t> data, std::size_t length, int low, Array<std::int64_t> out) {
    nb::gil_scoped_release unlocked;
    tacit::unpack_places(span(data), length, low, span(out));
}

}  // namespace

#define FLOAT32S "torch.Tensor | numpy.typing.NDArray[numpy.float32]"
#define INT64S "torch.Tensor | numpy.typing.NDArray[numpy.int64]"
#define BYTES "torch.Tensor | numpy.typing.NDArray[numpy.uint8]"

void tacit::bind_sparse(nb::module_& m) {
    m.def("select_largest", &::select_largest, "x"_a.noconvert(), "length"_a, "kept"_a, "out"_a.noconvert(),
          nb::sig("def select_largest(x: " FLOAT32S ", length: int, kept: int, out: " INT64S ") -> None"),
          "The places of the `kept` largest magnitudes of every `length` elements, rising; of equal ones the "
          "first.");
    m.def("count_above", &::count_above, "x"_a.noconvert(), "least"_a,
          nb::sig("def count_above(x: " FLOAT32S ", least: float) -> int"),
          "How many elements are `least` or more in magnitude, or NaN.");
    m.def("select_above", &::select_above, "x"_a.noconvert(), "least"_a, "out"_a.noconvert(),
          nb::sig("def select_above(x: " FLOAT32S ", least: float, out: " INT64S ") -> None"),
          "Which they are, rising; `out` has count_above() of them.");
    m.def("used_blocks", &::used_blocks, "x"_a.noconvert(), "block"_a, "out"_a.noconvert(),
          nb::sig("def used_blocks(x: " FLOAT32S ", block: int, out: " BYTES ") -> None"),
          "1 for each block of x that holds anything but zeros.");
    m.def("accumulate", &::accumulate, "x"_a.noconvert(), "momentum"_a, "u"_a.noconvert(), "v"_a.noconvert(),
          "wanted"_a.noconvert(),
          nb::sig("def accumulate(x: " FLOAT32S ", momentum: float, u: " FLOAT32S ", v: " FLOAT32S
                  ", wanted: " FLOAT32S ") -> None"),
          "u = momentum u + x; v = v + u; wanted = v. Where that is not finite, u and v stay as they are.");
    m.def("pack_places", &::pack_places, "places"_a.noconvert(), "length"_a, "low"_a, "out"_a.noconvert(),
          nb::sig("def pack_places(places: " INT64S ", length: int, low: int, out: " BYTES ") -> None"),
          "Rising places below `length` in few bits; see native/sparse_select.h.");
    m.def("unpack_places", &::unpack_places, "data"_a.noconvert(), "length"_a, "low"_a, "out"_a.noconvert(),
          nb::sig("def unpack_places(data: " BYTES ", length: int, low: int, out: " INT64S ") -> None"),
          "What pack_places() wrote; ValueError where the bytes name places that are not there.");
}
