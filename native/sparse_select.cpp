#include "sparse_select.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "blocks.h"
#include "refuse.h"
#include "sparse_kernels.h"

namespace tacit {
namespace {

constexpr std::size_t chunk = 1 << 14;  // elements between two looks at the room there is
constexpr std::size_t least_sampled = 8192, most_sampled = 16384;
constexpr std::size_t most_places = std::size_t(1) << 31;
constexpr std::size_t slack = 16;  // places that a kernel may write beyond those it found

// blocks.cpp picks the instruction set.
const SparseKernels& chosen() {
#ifdef TACIT_X86
    const std::string name = simd();
    if (name == avx512::sparse_kernels.name) return avx512::sparse_kernels;
    if (name == avx2::sparse_kernels.name) return avx2::sparse_kernels;
#endif
    return baseline::sparse_kernels;
}

// As integers, magnitudes are in order, and what is not finite is largest.
std::int32_t magnitude(float x) { return std::int32_t(std::bit_cast<std::uint32_t>(x) & 0x7fffffff); }

// The places of all that are `least` or more; `room` may grow.
std::size_t compact(const float* x, std::size_t numel, std::int32_t least, std::vector<std::uint32_t>& room) {
    const SparseKernels& kernels = chosen();
    std::size_t found = 0;
    for (std::size_t start = 0; start < numel; start += chunk) {
        if (room.size() < found + chunk + slack) room.resize(2 * (found + chunk + slack));
        found += kernels.compact(x + start, std::min(chunk, numel - start), std::uint32_t(start), least,
                                 room.data() + found);
    }
    return found;
}

// Two magnitudes that a few more and a few less than `kept` of x reach.
struct Bounds {
    std::int32_t low, high;
};

class Selector {
  public:
    void largest(const float* x, std::size_t numel, std::size_t kept, std::int64_t* out) {
        if (kept == numel) {
            for (std::size_t i = 0; i < numel; ++i) out[i] = std::int64_t(i);
            return;
        }
        const auto [found, high] = candidates(x, numel, kept);
        sizes_.resize(found);
        for (std::size_t i = 0; i < found; ++i) sizes_[i] = magnitude(x[room_[i]]);
        const std::int32_t least = least_of(kept, high);
        std::size_t equal = kept;  // how many of the least there is room for
        for (const std::int32_t size : sizes_) equal -= size > least;
        for (std::size_t i = 0; i < found; ++i)
            if (sizes_[i] > least || (sizes_[i] == least && equal && equal--)) *out++ = room_[i];
        learn(found, kept, least);
    }

  private:
    struct Found {
        std::size_t count;
        std::int32_t high;
    };

    // The places of `kept` or more, all those of the largest among them, in room_.
    Found candidates(const float* x, std::size_t numel, std::size_t kept) {
        if (numel < least_sampled && kept < numel / 8) {
            const std::size_t found = compact(x, numel, hint_, room_);
            if (found >= kept) return {found, std::numeric_limits<std::int32_t>::max()};
        }
        if (numel >= least_sampled && kept < numel / 2) {
            const Bounds bounds = estimate(x, numel, kept);
            const std::size_t found = compact(x, numel, bounds.low, room_);
            if (found >= kept) return {found, bounds.high};
        }
        return {compact(x, numel, 0, room_), std::numeric_limits<std::int32_t>::max()};
    }

    // What a short row's successor, which has no room for a sample, is tried with: half an octave below the
    // least that this one kept, or further down each time that was not enough.
    void learn(std::size_t found, std::size_t kept, std::int32_t least) {
        constexpr std::int32_t half_octave = 1 << 22;
        margin_ = found < kept + kept / 4 ? std::min(2 * margin_, 8 * half_octave) : half_octave;
        hint_ = std::max(0, least - margin_);
    }

    // By a sample, five standard deviations of what one of this size finds on either side.
    Bounds estimate(const float* x, std::size_t numel, std::size_t kept) {
        const std::size_t count = std::clamp(numel / 64, std::size_t(1024), most_sampled),
                          stride = numel / count;
        sample_.resize(count);
        for (std::size_t i = 0; i < count; ++i) {
            const std::uint32_t turn = std::uint32_t(i) * 0x9e3779b1u >> 16;  // what repeats must not fool it
            sample_[i] = magnitude(x[i * stride + turn % stride]);
        }
        const double share = double(kept) * double(count) / double(numel), spread = 5 * std::sqrt(share) + 4;
        const std::size_t low = std::min(std::size_t(share + spread), count - 1);
        const auto place = sample_.begin() + std::ptrdiff_t(low);
        std::nth_element(sample_.begin(), place, sample_.end(), std::greater<>());
        Bounds bounds{*place, std::numeric_limits<std::int32_t>::max()};
        if (share > spread) {
            const auto above = sample_.begin() + std::ptrdiff_t(share - spread);
            std::nth_element(sample_.begin(), above, place, std::greater<>());
            bounds.high = *above;
        }
        return bounds;
    }

    // The magnitude of number `kept` of sizes_: nearly always among the few up to `high`, which are looked at
    // first.
    std::int32_t least_of(std::size_t kept, std::int32_t high) {
        band_.clear();
        for (const std::int32_t size : sizes_)
            if (size <= high) band_.push_back(size);
        std::size_t above = sizes_.size() - band_.size();
        if (above >= kept) {
            band_ = sizes_;
            above = 0;
        }
        const auto last = band_.begin() + std::ptrdiff_t(kept - above - 1);
        std::nth_element(band_.begin(), last, band_.end(), std::greater<>());
        return *last;
    }

    std::int32_t hint_ = 0, margin_ = 1 << 22;
    std::vector<std::uint32_t> room_;
    std::vector<std::int32_t> sample_, sizes_, band_;
};

void check(std::size_t kept, std::size_t length, int low, std::size_t nbytes) {
    if (low < 0 || low > 31 || length < 1 || length > most_places || kept > length)
        refuse(kept, " of ", length, " places with low=", low,
               " do not go together: at most 2^31, and as many as there are");
    if (nbytes != places_nbytes(kept, length, low))
        refuse(nbytes, " bytes are not those of ", kept, " places below ", length, " with low=", low, ": ",
               places_nbytes(kept, length, low));
}

}  // namespace

void select_largest(std::span<const float> x, std::size_t length, std::size_t kept,
                    std::span<std::int64_t> out) {
    if (length < 1 || length > most_places || kept < 1 || kept > length || x.size() % length ||
        out.size() != x.size() / length * kept)
        refuse(x.size(), " elements in rows of ", length, ", ", kept, " of each: ", out.size(),
               " places do not go together");
    Selector selector;
    for (std::size_t row = 0; row < x.size() / length; ++row)
        selector.largest(x.data() + row * length, length, kept, out.data() + row * kept);
}

std::size_t count_above(std::span<const float> x, float least) {
    return chosen().count(x.data(), x.size(), magnitude(least));
}

void select_above(std::span<const float> x, float least, std::span<std::int64_t> out) {
    std::vector<std::uint32_t> room;
    if (x.size() > most_places) refuse(x.size(), " elements; at most 2^31");
    const std::size_t found = compact(x.data(), x.size(), magnitude(least), room);
    if (found != out.size()) refuse(found, " elements are large enough, and there is room for ", out.size());
    std::copy_n(room.begin(), found, out.begin());
}

void used_blocks(std::span<const float> x, std::size_t block, std::span<std::uint8_t> out) {
    if (block < 1 || out.size() != (x.size() + block - 1) / block)
        refuse(x.size(), " elements are not ", out.size(), " blocks of ", block);
    chosen().used(x.data(), x.size(), block, out.data());
}

void accumulate(std::span<const float> x, float momentum, std::span<float> u, std::span<float> v,
                std::span<float> wanted) {
    if (u.size() != x.size() || v.size() != x.size() || wanted.size() != x.size())
        refuse("x, u, v and wanted have ", x.size(), ", ", u.size(), ", ", v.size(), " and ", wanted.size(),
               " elements; all have the same number");
    chosen().accumulate(x.data(), x.size(), momentum, u.data(), v.data(), wanted.data());
}

std::size_t places_nbytes(std::size_t kept, std::size_t length, int low) {
    return (kept * std::size_t(low) + kept + ((length - 1) >> low) + 7) / 8;
}

void pack_places(std::span<const std::int64_t> places, std::size_t length, int low,
                 std::span<std::uint8_t> out) {
    check(places.size(), length, low, out.size());
    std::fill(out.begin(), out.end(), std::uint8_t(0));
    std::uint64_t bits = 0;
    int held = 0;
    std::uint8_t* at = out.data();
    std::int64_t last = -1;
    for (const std::int64_t place : places) {
        if (place <= last || place >= std::int64_t(length))
            refuse("place ", place, " of ", length, " is out of order");
        last = place;
        bits |= (std::uint64_t(place) & ((std::uint64_t(1) << low) - 1)) << held;
        for (held += low; held >= 8; held -= 8, bits >>= 8) *at++ = std::uint8_t(bits);
    }
    if (held) *at = std::uint8_t(bits);
    std::size_t bit = places.size() * std::size_t(low);
    for (const std::int64_t place : places) {
        const std::size_t own = bit++ + (std::size_t(place) >> low);
        out[own / 8] = std::uint8_t(out[own / 8] | 1u << own % 8);
    }
}

void unpack_places(std::span<const std::uint8_t> data, std::size_t length, int low,
                   std::span<std::int64_t> out) {
    check(out.size(), length, low, data.size());
    const std::size_t start = out.size() * std::size_t(low),
                      stop = start + out.size() + ((length - 1) >> low);
    const std::uint64_t mask = (std::uint64_t(1) << low) - 1;
    std::size_t bit = start, from = 0;
    std::int64_t last = -1;
    for (std::size_t k = 0; k < out.size(); ++k, ++bit, from += std::size_t(low)) {
        while (bit < stop) {  // to the next one
            const unsigned rest = unsigned(data[bit / 8]) >> bit % 8;
            if (rest) {
                bit += std::size_t(std::countr_zero(rest));
                break;
            }
            bit = (bit / 8 + 1) * 8;
        }
        std::uint64_t word = 0;
        std::memcpy(&word, data.data() + from / 8, std::min<std::size_t>(8, data.size() - from / 8));
        const std::uint64_t high = bit < stop ? bit - start - k : length;
        const std::int64_t place = std::int64_t(high << low | (word >> from % 8 & mask));
        if (bit >= stop || place <= last || place >= std::int64_t(length))
            refuse("place ", place, " of ", length, " is not there, or out of order");
        out[k] = last = place;
    }
}

}  // namespace tacit
