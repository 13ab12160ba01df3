// Threads for loops over many elements. They are started when first asked for and wait for the next loop: a
// new thread a call costs more than it saves, because its stack has to be faulted in again.
#pragma once

#include <cstddef>
#include <functional>

namespace tacit {

using Shares = std::function<void(std::size_t worker, std::size_t begin, std::size_t end)>;

void share_out_among(std::size_t units, std::size_t step, std::size_t workers, const Shares& work);

// work(worker, begin, end) until all of [0, units) is done, `step` units at a time, by the calling thread
// (worker 0) and up to workers - 1 others. Each takes the next share when it is done with its last, so that
// nobody waits for a thread that is late or was never started. `work` must not throw.
template <class Work>
void share_out(std::size_t units, std::size_t step, std::size_t workers, const Work& work) {
    if (units && workers == 1) return work(std::size_t(0), std::size_t(0), units);
    share_out_among(units, step, workers, std::cref(work));
}

}  // namespace tacit
