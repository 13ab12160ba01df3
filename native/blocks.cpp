#include "blocks.h"

#include <atomic>
#include <bit>
#include <stdexcept>

#include "kernels.h"
#include "refuse.h"

namespace tacit {
namespace {

static_assert(std::endian::native == std::endian::little, "scales go to the wire as they lie in memory");

constexpr std::size_t most_numel = std::size_t(1) << 60;  // no size below overflows under it

void check_nbytes(std::size_t numel, Layout layout, std::string_view name, std::size_t nbytes) {
    const std::size_t needed = packed_nbytes(numel, layout);
    if (nbytes != needed)
        refuse(name, " has ", std::to_string(nbytes), " bytes: ", std::to_string(numel),
               " elements at bits=", std::to_string(layout.bits), ", block=", std::to_string(layout.block),
               " take exactly ", std::to_string(needed), "; see packed_nbytes()");
}

std::vector<const Kernels*> runnable() {
    std::vector<const Kernels*> found{&baseline::kernels};
#ifdef TACIT_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) found.push_back(&avx2::kernels);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        found.push_back(&avx512::kernels);
#endif
    return found;
}

std::atomic<const Kernels*>& in_use() {
    static std::atomic<const Kernels*> kernels{runnable().back()};
    return kernels;
}

void check_mean(std::size_t numel, std::size_t count, std::size_t room) {
    if (numel != room)
        refuse("total and out have ", std::to_string(numel), " and ", std::to_string(room),
               " elements; both have the same number");
    if (count == 0 || count > (std::size_t(1) << 24))
        refuse("a mean of ", std::to_string(count), " ranks; give 1 to 2^24");
}

}  // namespace

std::size_t packed_nbytes(std::size_t numel, Layout layout) {
    const auto [bits, block] = layout;
    if (bits != 8 && bits != 4) refuse("bits=", std::to_string(bits), ": blocks are packed in 8 or 4 bits");
    if (block < 2 || block % 2)
        refuse("block=", std::to_string(block), ": a block has an even number of elements, 2 or more");
    if (numel > most_numel) refuse("numel=", std::to_string(numel), ": at most ", std::to_string(most_numel));
    const std::size_t full = numel / block, rest = numel % block;
    return (full ? full * layout.record_nbytes(block) : 0) + (rest ? layout.record_nbytes(rest) : 0);
}

std::size_t pack_blocks(std::span<const float> x, Layout layout, std::uint64_t seed, bool stochastic,
                        std::span<std::uint8_t> out) {
    check_nbytes(x.size(), layout, "out", out.size());
    const Kernels& kernels = *in_use().load();
    const auto pack = layout.bits == 8 ? kernels.pack8 : kernels.pack4;
    return pack(x.data(), x.size(), layout.block, seed, stochastic, out.data());
}

void unpack_blocks(std::span<const std::uint8_t> data, Layout layout, float gain, bool add,
                   std::span<float> out) {
    check_nbytes(out.size(), layout, "data", data.size());
    const Kernels& kernels = *in_use().load();
    const auto unpack = layout.bits == 8 ? kernels.unpack8 : kernels.unpack4;
    unpack(data.data(), out.size(), layout.block, gain, add, out.data());
}

void random_bits(std::uint64_t seed, std::span<std::uint32_t> out) {
    in_use().load()->random_bits(seed, out.size(), out.data());
}

double keep(std::span<const float> x, std::span<const float> reference, std::span<float> out) {
    if (x.size() != out.size() || x.size() != reference.size())
        refuse("x, reference and out have ", std::to_string(x.size()), ", ", std::to_string(reference.size()),
               " and ", std::to_string(out.size()), " elements; all have the same number");
    return in_use().load()->keep(x.data(), reference.data(), x.size(), out.data());
}

bool mean(std::span<const float> total, std::size_t count, std::span<float> out) {
    check_mean(total.size(), count, out.size());
    return in_use().load()->mean(total.data(), total.size(), float(count), out.data());
}

bool mean_bf16(std::span<const std::uint16_t> total, std::size_t count, std::span<float> out) {
    check_mean(total.size(), count, out.size());
    return in_use().load()->mean_bf16(total.data(), total.size(), float(count), out.data());
}

std::vector<std::string> simd_variants() {
    std::vector<std::string> names;
    for (const Kernels* kernels : runnable()) names.emplace_back(kernels->name);
    return names;
}

std::string simd() { return in_use().load()->name; }

void use_simd(std::string_view name) {
    std::string choices;
    for (const Kernels* kernels : runnable()) {
        if (name == kernels->name) {
            in_use() = kernels;
            return;
        }
        choices += (choices.empty() ? "" : ", ") + std::string(kernels->name);
    }
    refuse("simd '", name, "' is not one this machine can run; choose from ", choices);
}

}  // namespace tacit
