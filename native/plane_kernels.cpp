// The adding loops of the aggregator's user-space plane, compiled once for each instruction set.
#include "plane_kernels.h"

#include <cstring>

namespace {

using std::size_t;

// `Lane`: what is added. `Wide`: the unsigned type of its size, where sums wrap by the rules of the language.
template <class Lane, class Wide, class Add>
bool add_lanes(const std::uint8_t* payload, size_t numel, Lane* __restrict lanes, Add add) {
    Wide over = 0;
    for (size_t i = 0; i < numel; ++i) {
        Wide b;
        std::memcpy(&b, payload + i * sizeof b, sizeof b);  // no address is odd to it
        lanes[i] = Lane(add(Wide(lanes[i]), b, over));
    }
    return over != 0;
}

template <class Lane>
bool add_saturating(const std::uint8_t* payload, size_t numel, Lane* lanes) {
    return add_lanes<Lane, Lane>(payload, numel, lanes, [](Lane a, Lane b, Lane& over) {
        const Lane room = Lane(~a), less = b < room ? b : room;
        over |= Lane(less ^ b);
        return Lane(a + less);
    });
}

bool add_wrapping(const std::uint8_t* payload, size_t numel, std::int32_t* lanes) {
    using Word = std::uint32_t;
    return add_lanes<std::int32_t, Word>(payload, numel, lanes, [](Word a, Word b, Word& over) {
        const Word sum = a + b;
        over |= ((a ^ sum) & (b ^ sum)) >> 31;  // both had another sign than the sum
        return sum;
    });
}

bool add_floats(const std::uint8_t* payload, size_t numel, float* __restrict lanes) {
    for (size_t i = 0; i < numel; ++i) {
        float b;
        std::memcpy(&b, payload + i * sizeof b, sizeof b);
        lanes[i] += b;
    }
    return false;
}

}  // namespace

#define TACIT_TEXT_(x) #x
#define TACIT_TEXT(x) TACIT_TEXT_(x)

namespace tacit::TACIT_VARIANT {
extern const PlaneKernels plane_kernels{TACIT_TEXT(TACIT_VARIANT), add_saturating<std::uint8_t>,
                                        add_saturating<std::uint16_t>, add_wrapping, add_floats};
}
