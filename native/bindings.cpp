// tacit._core: arrays in, spans out. The only file that knows Python.
// std::invalid_argument reaches Python as ValueError.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "blocks.h"

namespace nb = nanobind;
using namespace nb::literals;
using tacit::Layout;

namespace {

// Any 1-D contiguous CPU array that speaks DLPack or the buffer protocol: torch, numpy, memoryview.
template <class T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T>
std::span<T> span(const Array<T>& array) {
    return {array.data(), array.size()};
}

std::size_t pack_blocks(Array<const float> x, int bits, std::size_t block, std::uint64_t seed,
                        bool stochastic, Array<std::uint8_t> out) {
    nb::gil_scoped_release unlocked;
    return tacit::pack_blocks(span(x), Layout{bits, block}, seed, stochastic, span(out));
}

void unpack_blocks(Array<const std::uint8_t> data, std::size_t numel, int bits, std::size_t block, float gain,
                   bool add, Array<float> out) {
    if (out.size() != numel)
        throw nb::value_error(
            ("out has " + std::to_string(out.size()) + " elements; numel=" + std::to_string(numel)).c_str());
    nb::gil_scoped_release unlocked;
    tacit::unpack_blocks(span(data), Layout{bits, block}, gain, add, span(out));
}

void random_bits(std::uint64_t seed, Array<std::uint32_t> out) {
    nb::gil_scoped_release unlocked;
    tacit::random_bits(seed, span(out));
}

std::size_t packed_nbytes(std::size_t numel, int bits, std::size_t block) {
    return tacit::packed_nbytes(numel, Layout{bits, block});
}

}  // namespace

// Types as a type checker reads them: nanobind's own name numpy alone, and mypy would then refuse tensors.
#define FLOAT32S "torch.Tensor | numpy.typing.NDArray[numpy.float32]"
#define UINT32S "torch.Tensor | numpy.typing.NDArray[numpy.uint32]"
#define BYTES "torch.Tensor | numpy.typing.NDArray[numpy.uint8]"

// noconvert: a wrong dtype or stride is a TypeError, not a silent copy (what goes to a copy of `out` is
// lost).
NB_MODULE(_core, m) {
    m.doc() = "The C++ core: loops at the speed of memory. Arrays are 1-D, contiguous, on the CPU.";

    m.def("packed_nbytes", &packed_nbytes, "numel"_a, "bits"_a, "block"_a,
          "Bytes that `numel` elements take once packed.");
    m.def("pack_blocks", &pack_blocks, "x"_a.noconvert(), "bits"_a, "block"_a, "seed"_a, "stochastic"_a,
          "out"_a.noconvert(),
          nb::sig("def pack_blocks(x: " FLOAT32S
                  ", bits: int, block: int, seed: int, stochastic: bool, out: " BYTES ") -> int"),
          "How many blocks were not finite, after packing `x` into `out` (of packed_nbytes() bytes).\n\n"
          "A block with a NaN or an infinity decodes to NaN. `x` is only read; the GIL is released.");
    m.def("unpack_blocks", &unpack_blocks, "data"_a.noconvert(), "numel"_a, "bits"_a, "block"_a, "gain"_a,
          "add"_a, "out"_a.noconvert(),
          nb::sig("def unpack_blocks(data: " BYTES
                  ", numel: int, bits: int, block: int, gain: float, add: bool, out: " FLOAT32S ") -> None"),
          "out[i] = (out[i] if add else 0) + gain * decoded[i]; `data` is only read, the GIL is released.");
    m.def("random_bits", &random_bits, "seed"_a, "out"_a.noconvert(),
          nb::sig("def random_bits(seed: int, out: " UINT32S ") -> None"),
          "Fills `out` with the bits that stochastic rounding uses for elements 0, 1, 2, ... under `seed`.");
    m.def("simd", &tacit::simd, "The instruction set in use.");
    m.def("simd_variants", &tacit::simd_variants,
          "The instruction sets this CPU can run, slowest first; all give the same bits.");
    m.def("use_simd", &tacit::use_simd, "name"_a,
          "Runs on the named instruction set from now on, in all threads.");
}
