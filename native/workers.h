// Threads for loops over many elements. They are started when first asked for and wait for the next loop: a
// new thread a call costs more than it saves, because its stack has to be faulted in again.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>

namespace tacit {

using Shares = std::function<void(std::size_t worker, std::size_t begin, std::size_t end)>;

void share_out_among(std::size_t units, std::size_t step, std::size_t workers,
                     const Shares& work);  // two or more

// work(worker, begin, end) until all of [0, units) is done, `step` units at a time or a multiple (the last
// perhaps fewer), by the calling thread (worker 0) and up to workers - 1 others. Each takes the next share, a
// quarter of its part of what is left, when it is done with its last, so that nobody waits for a thread that
// was never started, nor long for one that is late. `work` must not throw.
template <class Work>
void share_out(std::size_t units, std::size_t step, std::size_t workers, const Work& work) {
    const std::size_t shares = (units + step - 1) / step, needed = std::min(workers, shares);
    if (needed > 1)
        share_out_among(units, step, needed, std::cref(work));
    else if (units)
        work(std::size_t(0), std::size_t(0), units);
}

}  // namespace tacit
