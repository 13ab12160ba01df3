// tacit._core: arrays in, spans out. It and the other *_bindings.cpp are the only files that know Python.
// std::invalid_argument reaches Python as ValueError.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "aggregator_bindings.h"
#include "arrays.h"
#include "blocks.h"
#include "fewbits_bindings.h"
#include "low_rank.h"
#include "recycled.h"
#include "rotated.h"
#include "row_index.h"
#include "rows.h"
#include "sparse_bindings.h"
#include "topk.h"

namespace nb = nanobind;
using namespace nb::literals;
using tacit::Array;
using tacit::ConstLanes;
using tacit::Lanes;
using tacit::Layout;
using tacit::span;
using tacit::with_lanes;

namespace {

void check_numel(const char* name, std::size_t size, std::size_t numel) {
    if (size == numel) return;
    throw nb::value_error(
        (std::string(name) + " has " + std::to_string(size) + " elements; numel=" + std::to_string(numel))
            .c_str());
}

std::size_t pack_blocks(Array<const float> x, int bits, std::size_t block, std::uint64_t seed,
                        bool stochastic, Array<std::uint8_t> out) {
    nb::gil_scoped_release unlocked;
    return tacit::pack_blocks(span(x), Layout{bits, block}, seed, stochastic, span(out));
}

void unpack_blocks(Array<const std::uint8_t> data, std::size_t numel, int bits, std::size_t block, float gain,
                   bool add, Array<float> out) {
    check_numel("out", out.size(), numel);
    nb::gil_scoped_release unlocked;
    tacit::unpack_blocks(span(data), Layout{bits, block}, gain, add, span(out));
}

void random_bits(std::uint64_t seed, Array<std::uint32_t> out) {
    nb::gil_scoped_release unlocked;
    tacit::random_bits(seed, span(out));
}

double keep(Array<const float> x, Array<const float> reference, Array<float> out) {
    nb::gil_scoped_release unlocked;
    return tacit::keep(span(x), span(reference), span(out));
}

bool mean(Array<const float> total, std::size_t count, Array<float> out) {
    nb::gil_scoped_release unlocked;
    return tacit::mean(span(total), count, span(out));
}

bool mean_bf16(Array<const std::uint16_t> total, std::size_t count, Array<float> out) {
    nb::gil_scoped_release unlocked;
    return tacit::mean_bf16(span(total), count, span(out));
}

void topk_pack(Array<const float> x, std::size_t length, std::size_t kept, int bits, int low,
               std::size_t high, Array<std::uint8_t> out) {
    nb::gil_scoped_release unlocked;
    tacit::topk_pack(span(x), {length, kept, bits, low, high}, span(out));
}

void topk_add(Array<const std::uint8_t> data, std::size_t length, std::size_t kept, int bits, int low,
              std::size_t high, Array<float> out) {
    nb::gil_scoped_release unlocked;
    tacit::topk_add(span(data), {length, kept, bits, low, high}, span(out));
}

void hush_norms(Array<const float> x, Array<double> out, int threads) {
    nb::gil_scoped_release unlocked;
    tacit::hush_norms(span(x), span(out), threads);
}

void hush_encode(Array<const float> x, Array<const double> norms, std::uint64_t sign_seed,
                 std::uint64_t dither_seed, int place, double alpha, double range, int granularity,
                 Array<const std::uint8_t> cell, Array<std::uint8_t> out, int threads) {
    nb::gil_scoped_release unlocked;
    tacit::hush_encode(span(x), span(norms), {sign_seed, dither_seed, range, granularity}, place, alpha,
                       span(cell), span(out), threads);
}

void hush_decode(ConstLanes lanes, Array<const double> norms, std::uint64_t sign_seed,
                 std::uint64_t dither_seed, Array<const float> offsets, double range, int granularity,
                 Array<float> out, float gain, int threads) {
    with_lanes(lanes, [&](auto sums) {
        tacit::hush_decode(sums, span(norms), {sign_seed, dither_seed, range, granularity}, span(offsets),
                           gain, span(out), threads);
    });
}

std::size_t add_table(Array<const std::uint8_t> index, std::size_t numel, Array<const std::uint8_t> table,
                      Lanes lanes, int threads) {
    check_numel("lanes", lanes.size(), numel);
    return with_lanes(lanes,
                      [&](auto sums) { return tacit::add_table(span(index), span(table), sums, threads); });
}

void lookup_table(Array<const std::uint8_t> index, std::size_t numel, Array<const std::uint8_t> table,
                  Lanes lanes, int threads) {
    check_numel("lanes", lanes.size(), numel);
    with_lanes(lanes, [&](auto sums) { tacit::lookup_table(span(index), span(table), sums, threads); });
}

void thc_encode(Array<const float> x, Array<const double> norms, int slice_log2, int block_log2,
                std::uint64_t sign_seed, std::uint64_t round_seed, double t_p,
                Array<const std::uint8_t> table, int bits, Array<std::uint8_t> out, int threads) {
    nb::gil_scoped_release unlocked;
    tacit::thc_encode(span(x), span(norms), {slice_log2, block_log2, sign_seed, t_p}, round_seed, span(table),
                      bits, span(out), threads);
}

void thc_decode(ConstLanes lanes, std::size_t numel, int slice_log2, int block_log2, std::uint64_t sign_seed,
                Array<const double> norms, double t_p, int granularity, int count, Array<float> out,
                float gain, int threads) {
    check_numel("out", out.size(), numel);
    with_lanes(lanes, [&](auto sums) {
        tacit::thc_decode(sums, span(norms), {slice_log2, block_log2, sign_seed, t_p}, granularity, count,
                          gain, span(out), threads);
    });
}

// A factor, one column after another.
template <class T>
using Columns = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <class T>
tacit::Factor<T> factor(const Columns<T>& array) {
    return {{array.data(), array.size()}, array.shape(0), array.shape(1)};
}

void low_rank_left(Array<const float> x, Array<const float> e, Columns<const float> q, Columns<float> p,
                   int threads) {
    nb::gil_scoped_release unlocked;
    tacit::low_rank_left(span(x), span(e), factor(q), factor(p), threads);
}

void low_rank_right(Array<const float> x, Array<const float> e, Columns<const float> p, Columns<float> q,
                    int threads) {
    nb::gil_scoped_release unlocked;
    tacit::low_rank_right(span(x), span(e), factor(p), factor(q), threads);
}

void low_rank_finish(Array<const float> x, Array<float> e, Columns<const float> p, Columns<const float> own,
                     Columns<const float> total, Array<float> out, int threads) {
    nb::gil_scoped_release unlocked;
    tacit::low_rank_finish(span(x), span(e), factor(p), factor(own), factor(total), span(out), threads);
}

std::size_t low_rank_orthonormalize(Columns<float> p, std::uint64_t seed) {
    nb::gil_scoped_release unlocked;
    return tacit::low_rank_orthonormalize(factor(p), seed);
}

// Small tables of integers: rows of any width.
using Table = nb::ndarray<const std::int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

std::span<const std::int64_t> table(const Table& rows, std::size_t width) {
    if (rows.shape(1) != width)
        throw nb::value_error(("a row has " + std::to_string(rows.shape(1)) + " numbers; " +
                               std::to_string(width) + " are needed")
                                  .c_str());
    return {rows.data(), rows.size()};
}

void low_rank_lefts(Array<const float> x, Array<const float> e, Table matrices, Array<const float> q,
                    Array<float> p, int threads) {
    const auto rows = table(matrices, 4);
    nb::gil_scoped_release unlocked;
    tacit::low_rank_lefts(span(x), span(e), rows, span(q), span(p), threads);
}

void low_rank_rights(Array<const float> x, Array<const float> e, Table matrices, Array<const float> p,
                     Array<float> q, int threads) {
    const auto rows = table(matrices, 4);
    nb::gil_scoped_release unlocked;
    tacit::low_rank_rights(span(x), span(e), rows, span(p), span(q), threads);
}

void low_rank_finishes(Array<const float> x, Array<float> e, Table matrices, Array<const float> p,
                       Array<const float> own, Array<const float> total, Array<float> out, int threads) {
    const auto rows = table(matrices, 4);
    nb::gil_scoped_release unlocked;
    tacit::low_rank_finishes(span(x), span(e), rows, span(p), span(own), span(total), span(out), threads);
}

std::size_t low_rank_orthonormalize_all(Array<float> p, Table shapes, std::uint64_t seed) {
    const auto rows = table(shapes, 2);
    nb::gil_scoped_release unlocked;
    return tacit::low_rank_orthonormalize_all(span(p), rows, seed);
}

// Rows of a sharded table, one after another: float32 or bfloat16.
using Rows = nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Keys = Array<const std::int64_t>;

tacit::RowWeights row_weights(const Rows& weights) {
    const auto type = weights.dtype();
    const bool bf16 = type.code == std::uint8_t(nb::dlpack::dtype_code::Bfloat) && type.bits == 16;
    if (!bf16 && type != nb::dtype<float>()) throw nb::type_error("weights are float32 or bfloat16");
    return {weights.data(), bf16, weights.shape(0), weights.shape(1)};
}

void row_route(Keys keys, std::uint64_t table, Array<std::int64_t> order, Array<std::int64_t> counts) {
    nb::gil_scoped_release unlocked;
    tacit::row_route(span(keys), table, span(order), span(counts));
}

void row_values(Keys keys, std::uint64_t table, std::uint64_t seed, bool normal, float scale,
                Columns<float> out, int threads) {
    const auto rows = factor(out);
    nb::gil_scoped_release unlocked;
    tacit::row_values(span(keys), table, seed, normal, scale, rows.length, rows.all, threads);
}

void row_sums(Columns<const float> gradients, Keys targets, float count, Columns<float> out, int threads) {
    const auto from = factor(gradients);
    const auto to = factor(out);
    nb::gil_scoped_release unlocked;
    tacit::row_sums(from.all, span(targets), from.length, count, to.all, threads);
}

void row_exact_sums(Columns<const float> gradients, Keys targets, int exponent, float count,
                    Columns<float> out, int threads) {
    const auto from = factor(gradients);
    const auto to = factor(out);
    nb::gil_scoped_release unlocked;
    tacit::row_exact_sums(from.all, span(targets), from.length, exponent, count, to.all, threads);
}

void row_sgd(Rows weights, Keys rows, Columns<const float> gradients, float rate, int threads) {
    const auto w = row_weights(weights);
    nb::gil_scoped_release unlocked;
    tacit::row_sgd(w, span(rows), factor(gradients).all, rate, threads);
}

void row_adagrad(Rows weights, Columns<float> squares, Keys rows, Columns<const float> gradients, float rate,
                 float eps, int threads) {
    const auto w = row_weights(weights);
    nb::gil_scoped_release unlocked;
    tacit::row_adagrad(w, factor(squares).all, span(rows), factor(gradients).all, rate, eps, threads);
}

void row_row_adagrad(Rows weights, Array<float> squares, Keys rows, Columns<const float> gradients,
                     float rate, float eps, int threads) {
    const auto w = row_weights(weights);
    nb::gil_scoped_release unlocked;
    tacit::row_row_adagrad(w, span(squares), span(rows), factor(gradients).all, rate, eps, threads);
}

void row_ftrl(Rows weights, Columns<float> z, Columns<float> squares, Keys rows,
              Columns<const float> gradients, float rate, float beta, float l1, float l2, int threads) {
    const auto w = row_weights(weights);
    nb::gil_scoped_release unlocked;
    tacit::row_ftrl(w, factor(z).all, factor(squares).all, span(rows), factor(gradients).all, rate, beta, l1,
                    l2, threads);
}

void row_lazy_adam(Rows weights, Columns<float> m, Columns<float> v, Keys rows,
                   Columns<const float> gradients, float rate, float beta1, float beta2, float eps,
                   int threads) {
    const auto w = row_weights(weights);
    nb::gil_scoped_release unlocked;
    tacit::row_lazy_adam(w, factor(m).all, factor(v).all, span(rows), factor(gradients).all, rate, beta1,
                         beta2, eps, threads);
}

void index_find(const tacit::RowIndex& index, Keys keys, Array<std::int64_t> rows, int threads) {
    nb::gil_scoped_release unlocked;
    index.find(span(keys), span(rows), threads);
}

std::size_t index_add(tacit::RowIndex& index, Keys keys, Array<std::int64_t> rows) {
    nb::gil_scoped_release unlocked;
    return index.add(span(keys), span(rows));
}

void index_keys(const tacit::RowIndex& index, Array<std::int64_t> out) {
    check_numel("out", out.size(), index.size());
    std::copy(index.keys().begin(), index.keys().end(), out.data());
}

std::size_t packed_nbytes(std::size_t numel, int bits, std::size_t block) {
    return tacit::packed_nbytes(numel, Layout{bits, block});
}

// DLPack's tensor, as its specification lays it out (version 0.8). torch frees it without Python: a thread of
// a process group that wanted the interpreter's lock could wait for ever.
struct ManagedTensor {
    void* data;
    std::int32_t device_type, device_id;
    std::int32_t ndim;
    std::uint8_t code, bits;
    std::uint16_t lanes;
    std::int64_t* shape;
    std::int64_t* strides;
    std::uint64_t byte_offset;
    void* context;
    void (*deleter)(ManagedTensor*);
};

struct RecycledTensor {
    ManagedTensor tensor;  // first: its address is this one's
    tacit::Recycled::Block block;
    std::int64_t shape, stride;
};

void free_recycled(ManagedTensor* tensor) {
    auto* owner = reinterpret_cast<RecycledTensor*>(tensor);
    tacit::Recycled::instance().give(owner->block);
    delete owner;
}

nb::object recycled(std::size_t nbytes) {
    constexpr std::int32_t kCpu = 1;
    constexpr std::uint8_t kUnsigned = 1;
    auto* owner = new RecycledTensor{{}, tacit::Recycled::instance().take(nbytes), std::int64_t(nbytes), 1};
    owner->tensor = {owner->block.data, kCpu,           0, 1,       kUnsigned,     8, 1,
                     &owner->shape,     &owner->stride, 0, nullptr, &free_recycled};
    PyObject* capsule = PyCapsule_New(&owner->tensor, "dltensor", [](PyObject* self) {
        if (!PyCapsule_IsValid(self, "dltensor")) return;  // somebody took it over
        free_recycled(static_cast<ManagedTensor*>(PyCapsule_GetPointer(self, "dltensor")));
    });
    if (capsule == nullptr) {
        free_recycled(&owner->tensor);
        throw nb::python_error();
    }
    return nb::steal(capsule);
}

}  // namespace

// Types as a type checker reads them: nanobind's own name numpy alone, and mypy would then refuse tensors.
#define FLOAT32S "torch.Tensor | numpy.typing.NDArray[numpy.float32]"
#define UINT16S "torch.Tensor | numpy.typing.NDArray[numpy.uint16]"
#define FLOAT64S "torch.Tensor | numpy.typing.NDArray[numpy.float64]"
#define INT64S "torch.Tensor | numpy.typing.NDArray[numpy.int64]"
#define UINT32S "torch.Tensor | numpy.typing.NDArray[numpy.uint32]"
#define BYTES "torch.Tensor | numpy.typing.NDArray[numpy.uint8]"
#define ROWS "torch.Tensor | numpy.typing.NDArray[numpy.float32]"
#define LANES "torch.Tensor | numpy.typing.NDArray[numpy.uint8 | numpy.uint16 | numpy.int32]"

// noconvert: a wrong dtype or stride is a TypeError, not a silent copy (what goes to a copy of `out` is
// lost).
NB_MODULE(_core, m) {
    m.doc() =
        "The C++ core: loops at the speed of memory. Arrays are contiguous, on the CPU, and 1-D but for "
        "factors.";
    nb::set_leak_warnings(false);  // a daemon thread may hold a client when the interpreter ends

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
    m.def("recycled", &recycled, "nbytes"_a, nb::sig("def recycled(nbytes: int) -> object"),
          "A DLPack capsule of `nbytes` bytes with anything in them, which return to a list of free memory.");
    m.def(
        "release_recycled", [] { tacit::Recycled::instance().release(); },
        "Gives the free memory of recycled() back to the system.");
    m.def(
        "recycled_nbytes", [] { return tacit::Recycled::instance().kept_nbytes(); },
        "Bytes of memory of recycled() that nobody uses now.");
    m.def("keep", &keep, "x"_a.noconvert(), "reference"_a.noconvert(), "out"_a.noconvert(),
          nb::sig("def keep(x: " FLOAT32S ", reference: " FLOAT32S ", out: " FLOAT32S ") -> float"),
          "out = x, and |x - reference|^2 in the same pass; they do not overlap, the GIL is released.");
    m.def("mean", &mean, "total"_a.noconvert(), "count"_a, "out"_a.noconvert(),
          nb::sig("def mean(total: " FLOAT32S ", count: int, out: " FLOAT32S ") -> bool"),
          "out = total / count, and whether all of it is finite in the same pass; `out` may be `total`. The "
          "GIL is released.");
    m.def("mean_bf16", &mean_bf16, "total"_a.noconvert(), "count"_a, "out"_a.noconvert(),
          nb::sig("def mean_bf16(total: " UINT16S ", count: int, out: " FLOAT32S ") -> bool"),
          "The same of the bits of bfloat16.");

    m.def("hush_padded", &tacit::hush_padded, "numel"_a,
          "Lanes of `numel` elements; their indices take half as many bytes.");
    m.def("hush_blocks", &tacit::hush_blocks, "numel"_a, "Norms of `numel` elements: 8 a piece.");
    m.def("hush_norms", &hush_norms, "x"_a.noconvert(), "out"_a.noconvert(), "threads"_a = 1,
          nb::sig("def hush_norms(x: " FLOAT32S ", out: " FLOAT64S ", threads: int = 1) -> None"),
          "The norm of each block into `out`, of hush_blocks(); not finite if the block is not.");
    m.def("hush_encode", &hush_encode, "x"_a.noconvert(), "norms"_a.noconvert(), "sign_seed"_a,
          "dither_seed"_a, "place"_a, "alpha"_a, "range"_a, "granularity"_a, "cell"_a.noconvert(),
          "out"_a.noconvert(), "threads"_a = 1,
          nb::sig(
              "def hush_encode(x: " FLOAT32S ", norms: " FLOAT64S
              ", sign_seed: int, dither_seed: int, place: int, alpha: float, range: float, granularity: int, "
              "cell: " BYTES ", out: " BYTES ", threads: int = 1) -> None"),
          "Rotated, dithered and rounded to the 4-bit index cell[floor(2 v)], two a byte into `out`.\n\n"
          "`out` has hush_padded() / 2 bytes; `x` is only read; the GIL is released. See native/rotated.h.");
    m.def("hush_decode", &hush_decode, "lanes"_a.noconvert(), "norms"_a.noconvert(), "sign_seed"_a,
          "dither_seed"_a, "offsets"_a.noconvert(), "range"_a, "granularity"_a, "out"_a.noconvert(), "gain"_a,
          "threads"_a = 1,
          nb::sig("def hush_decode(lanes: " LANES ", norms: " FLOAT64S
                  ", sign_seed: int, dither_seed: int, offsets: " FLOAT32S
                  ", range: float, granularity: int, out: " FLOAT32S
                  ", gain: float, threads: int = 1) -> None"),
          "out = gain * the rotation undone of (lane + offsets[dither nibble]) steps.\n\n"
          "A block whose norm is not finite decodes to NaN. `lanes`, of hush_padded(), are only read.");
    m.def(
        "add_table", &add_table, "index"_a.noconvert(), "numel"_a, "table"_a.noconvert(),
        "lanes"_a.noconvert(), "threads"_a = 1,
        nb::sig("def add_table(index: " BYTES ", numel: int, table: " BYTES ", lanes: " LANES
                ", threads: int = 1) -> int"),
        "How many lanes would have passed the limit of their type, after lanes += table[index], saturating.");
    m.def("lookup_table", &lookup_table, "index"_a.noconvert(), "numel"_a, "table"_a.noconvert(),
          "lanes"_a.noconvert(), "threads"_a = 1,
          nb::sig("def lookup_table(index: " BYTES ", numel: int, table: " BYTES ", lanes: " LANES
                  ", threads: int = 1) -> None"),
          "lanes = table[index]: 4-bit indices, the even element in the low nibble.");
    m.def("thc_padded", &tacit::thc_padded, "numel"_a, "slice_log2"_a, "Lanes of `numel` elements.");
    m.def("thc_encode", &thc_encode, "x"_a.noconvert(), "norms"_a.noconvert(), "slice_log2"_a, "block_log2"_a,
          "sign_seed"_a, "round_seed"_a, "t_p"_a, "table"_a.noconvert(), "bits"_a, "out"_a.noconvert(),
          "threads"_a = 1,
          nb::sig(
              "def thc_encode(x: " FLOAT32S ", norms: " FLOAT64S
              ", slice_log2: int, block_log2: int, sign_seed: int, round_seed: int, t_p: float, table: " BYTES
              ", bits: int, out: " BYTES ", threads: int = 1) -> None"),
          "Rotated, clamped and rounded stochastically to indices into `table`, packed into `out`.\n\n"
          "4 and 3 bits take a nibble, 2 bits a quarter of a byte; one norm a slice. `x` is only read.");
    m.def("thc_decode", &thc_decode, "lanes"_a.noconvert(), "numel"_a, "slice_log2"_a, "block_log2"_a,
          "sign_seed"_a, "norms"_a.noconvert(), "t_p"_a, "granularity"_a, "count"_a, "out"_a.noconvert(),
          "gain"_a, "threads"_a = 1,
          nb::sig("def thc_decode(lanes: " LANES
                  ", numel: int, slice_log2: int, block_log2: int, sign_seed: int, norms: " FLOAT64S
                  ", t_p: float, granularity: int, count: int, out: " FLOAT32S
                  ", gain: float, threads: int = 1) -> None"),
          "gain * the mean over the `count` ranks whose table values add up to `lanes`, of thc_padded().\n\n"
          "A slice whose norm is not finite decodes to NaN. `lanes` are only read; the GIL is released.");

    m.def("topk_pack", &topk_pack, "x"_a.noconvert(), "length"_a, "kept"_a, "bits"_a, "low"_a, "high"_a,
          "out"_a.noconvert(),
          nb::sig("def topk_pack(x: " FLOAT32S
                  ", length: int, kept: int, bits: int, low: int, high: int, out: " BYTES ") -> None"),
          "The `kept` largest of every `length` elements into rows of `out`; see native/topk.h.");
    m.def("topk_add", &topk_add, "data"_a.noconvert(), "length"_a, "kept"_a, "bits"_a, "low"_a, "high"_a,
          "out"_a.noconvert(),
          nb::sig("def topk_add(data: " BYTES
                  ", length: int, kept: int, bits: int, low: int, high: int, out: " FLOAT32S ") -> None"),
          "out += what the rows of `data` say; `data` is only read, the GIL is released.");

    m.def(
        "low_rank_left", &low_rank_left, "x"_a.noconvert(), "e"_a.noconvert(), "q"_a.noconvert(),
        "p"_a.noconvert(), "threads"_a = 1,
        nb::sig("def low_rank_left(x: " FLOAT32S ", e: " FLOAT32S ", q: " FLOAT32S ", p: " FLOAT32S
                ", threads: int = 1) -> None"),
        "p[k, i] = the sum over j of (x + e)[i, j] * q[k, j], for a matrix in rows; see native/low_rank.h.");
    m.def("low_rank_right", &low_rank_right, "x"_a.noconvert(), "e"_a.noconvert(), "p"_a.noconvert(),
          "q"_a.noconvert(), "threads"_a = 1,
          nb::sig("def low_rank_right(x: " FLOAT32S ", e: " FLOAT32S ", p: " FLOAT32S ", q: " FLOAT32S
                  ", threads: int = 1) -> None"),
          "q[k, j] = the sum over i of (x + e)[i, j] * p[k, i].");
    m.def("low_rank_finish", &low_rank_finish, "x"_a.noconvert(), "e"_a.noconvert(), "p"_a.noconvert(),
          "own"_a.noconvert(), "total"_a.noconvert(), "out"_a.noconvert(), "threads"_a = 1,
          nb::sig("def low_rank_finish(x: " FLOAT32S ", e: " FLOAT32S ", p: " FLOAT32S ", own: " FLOAT32S
                  ", total: " FLOAT32S ", out: " FLOAT32S ", threads: int = 1) -> None"),
          "out = p^T total, and e = (x + e) - p^T own where that is finite; they do not overlap, the GIL is "
          "released.");
    m.def(
        "low_rank_orthonormalize", &low_rank_orthonormalize, "p"_a.noconvert(), "seed"_a,
        nb::sig("def low_rank_orthonormalize(p: " FLOAT32S ", seed: int) -> int"),
        "How many rows of `p` were dependent and replaced by random ones, after all were made orthonormal.");

    m.def("low_rank_lefts", &low_rank_lefts, "x"_a.noconvert(), "e"_a.noconvert(), "matrices"_a.noconvert(),
          "q"_a.noconvert(), "p"_a.noconvert(), "threads"_a = 1,
          nb::sig("def low_rank_lefts(x: " FLOAT32S ", e: " FLOAT32S ", matrices: " INT64S ", q: " FLOAT32S
                  ", p: " FLOAT32S ", threads: int = 1) -> None"),
          "low_rank_left of every matrix: start, rows, columns and rank of each are a row of `matrices`.");
    m.def("low_rank_rights", &low_rank_rights, "x"_a.noconvert(), "e"_a.noconvert(), "matrices"_a.noconvert(),
          "p"_a.noconvert(), "q"_a.noconvert(), "threads"_a = 1,
          nb::sig("def low_rank_rights(x: " FLOAT32S ", e: " FLOAT32S ", matrices: " INT64S ", p: " FLOAT32S
                  ", q: " FLOAT32S ", threads: int = 1) -> None"),
          "low_rank_right of every matrix.");
    m.def("low_rank_finishes", &low_rank_finishes, "x"_a.noconvert(), "e"_a.noconvert(),
          "matrices"_a.noconvert(), "p"_a.noconvert(), "own"_a.noconvert(), "total"_a.noconvert(),
          "out"_a.noconvert(), "threads"_a = 1,
          nb::sig("def low_rank_finishes(x: " FLOAT32S ", e: " FLOAT32S ", matrices: " INT64S ", p: " FLOAT32S
                  ", own: " FLOAT32S ", total: " FLOAT32S ", out: " FLOAT32S ", threads: int = 1) -> None"),
          "low_rank_finish of every matrix.");
    m.def("low_rank_orthonormalize_all", &low_rank_orthonormalize_all, "p"_a.noconvert(),
          "shapes"_a.noconvert(), "seed"_a,
          nb::sig("def low_rank_orthonormalize_all(p: " FLOAT32S ", shapes: " INT64S ", seed: int) -> int"),
          "low_rank_orthonormalize of every factor: rank and length of each are a row of `shapes`.");

    nb::class_<tacit::RowIndex>(
        m, "RowIndex",
        "Keys of a shard and their rows, numbered in the order in which they were added; any 64-bit key.")
        .def(nb::init<>())
        .def("__len__", &tacit::RowIndex::size)
        .def("find", &index_find, "keys"_a.noconvert(), "rows"_a.noconvert(), "threads"_a = 1,
             nb::sig("def find(self, keys: " INT64S ", rows: " INT64S ", threads: int = 1) -> None"),
             "The row of each key into `rows`; -1 where there is none.")
        .def("add", &index_add, "keys"_a.noconvert(), "rows"_a.noconvert(),
             nb::sig("def add(self, keys: " INT64S ", rows: " INT64S ") -> int"),
             "How many rows there are, after every key has one, which `rows` names.")
        .def("keys", &index_keys, "out"_a.noconvert(), nb::sig("def keys(self, out: " INT64S ") -> None"),
             "The keys by row into `out`, of len() elements.");
    m.def(
        "row_route", &row_route, "keys"_a.noconvert(), "table"_a, "order"_a.noconvert(),
        "counts"_a.noconvert(),
        nb::sig("def row_route(keys: " INT64S ", table: int, order: " INT64S ", counts: " INT64S ") -> None"),
        "Positions of `keys` by owner, mix(table, key) mod len(counts), into `order`; how many into "
        "`counts`.");
    m.def("row_values", &row_values, "keys"_a.noconvert(), "table"_a, "seed"_a, "normal"_a, "scale"_a,
          "out"_a.noconvert(), "threads"_a = 1,
          nb::sig("def row_values(keys: " INT64S
                  ", table: int, seed: int, normal: bool, scale: float, out: " FLOAT32S
                  ", threads: int = 1) -> None"),
          "The first values of rows, by seed, table and key alone: uniform in [-scale, scale), or normal.");
    m.def("row_sums", &row_sums, "gradients"_a.noconvert(), "targets"_a.noconvert(), "count"_a,
          "out"_a.noconvert(), "threads"_a = 1,
          nb::sig("def row_sums(gradients: " FLOAT32S ", targets: " INT64S ", count: float, out: " FLOAT32S
                  ", threads: int = 1) -> None"),
          "out[t] = the sum of the gradients with target t, in the order given, over `count`.");
    m.def(
        "row_exact_sums", &row_exact_sums, "gradients"_a.noconvert(), "targets"_a.noconvert(), "exponent"_a,
        "count"_a, "out"_a.noconvert(), "threads"_a = 1,
        nb::sig("def row_exact_sums(gradients: " FLOAT32S ", targets: " INT64S
                ", exponent: int, count: float, out: " FLOAT32S ", threads: int = 1) -> None"),
        "The same as integers, round(gradient * 2^exponent): the same bits in any order; see native/rows.h.");
    m.def("row_sgd", &row_sgd, "weights"_a.noconvert(), "rows"_a.noconvert(), "gradients"_a.noconvert(),
          "rate"_a, "threads"_a = 1,
          nb::sig("def row_sgd(weights: " ROWS ", rows: " INT64S ", gradients: " FLOAT32S
                  ", rate: float, threads: int = 1) -> None"),
          "w -= rate g, for the rows named, which increase; weights are float32 or bfloat16.");
    m.def("row_adagrad", &row_adagrad, "weights"_a.noconvert(), "squares"_a.noconvert(), "rows"_a.noconvert(),
          "gradients"_a.noconvert(), "rate"_a, "eps"_a, "threads"_a = 1,
          nb::sig("def row_adagrad(weights: " ROWS ", squares: " FLOAT32S ", rows: " INT64S
                  ", gradients: " FLOAT32S ", rate: float, eps: float, threads: int = 1) -> None"),
          "s += g^2;  w -= rate g / (sqrt(s) + eps).");
    m.def("row_row_adagrad", &row_row_adagrad, "weights"_a.noconvert(), "squares"_a.noconvert(),
          "rows"_a.noconvert(), "gradients"_a.noconvert(), "rate"_a, "eps"_a, "threads"_a = 1,
          nb::sig("def row_row_adagrad(weights: " ROWS ", squares: " FLOAT32S ", rows: " INT64S
                  ", gradients: " FLOAT32S ", rate: float, eps: float, threads: int = 1) -> None"),
          "row_adagrad with one s a row: s += the mean of g^2.");
    m.def("row_ftrl", &row_ftrl, "weights"_a.noconvert(), "z"_a.noconvert(), "squares"_a.noconvert(),
          "rows"_a.noconvert(), "gradients"_a.noconvert(), "rate"_a, "beta"_a, "l1"_a, "l2"_a,
          "threads"_a = 1,
          nb::sig("def row_ftrl(weights: " ROWS ", z: " FLOAT32S ", squares: " FLOAT32S ", rows: " INT64S
                  ", gradients: " FLOAT32S
                  ", rate: float, beta: float, l1: float, l2: float, threads: int = 1) -> None"),
          "FTRL-proximal (McMahan et al. 2013); see native/rows.h.");
    m.def("row_lazy_adam", &row_lazy_adam, "weights"_a.noconvert(), "m"_a.noconvert(), "v"_a.noconvert(),
          "rows"_a.noconvert(), "gradients"_a.noconvert(), "rate"_a, "beta1"_a, "beta2"_a, "eps"_a,
          "threads"_a = 1,
          nb::sig("def row_lazy_adam(weights: " ROWS ", m: " FLOAT32S ", v: " FLOAT32S ", rows: " INT64S
                  ", gradients: " FLOAT32S
                  ", rate: float, beta1: float, beta2: float, eps: float, threads: int = 1) -> None"),
          "Adam over the rows named alone; `rate` has the bias corrections of the step in it.");

    m.def("simd", &tacit::simd, "The instruction set in use.");
    m.def("simd_variants", &tacit::simd_variants,
          "The instruction sets this CPU can run, slowest first; all give the same bits.");
    m.def("use_simd", &tacit::use_simd, "name"_a,
          "Runs on the named instruction set from now on, in all threads.");

    tacit::bind_aggregator(m);
    tacit::bind_fewbits(m);
    tacit::bind_sparse(m);
}
