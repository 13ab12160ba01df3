#include "recycled.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <new>

namespace tacit {
namespace {

constexpr std::size_t kAlignment = 64;

std::size_t rounded(std::size_t nbytes) {
    const std::size_t unit = std::max(std::bit_floor(nbytes) / 8, kAlignment);
    return (nbytes + unit - 1) / unit * unit;
}

}  // namespace

Recycled::Block Recycled::take(std::size_t nbytes) {
    nbytes = rounded(nbytes);
    std::lock_guard lock(mutex_);
    used_nbytes_ += nbytes;
    most_nbytes_ = std::max(most_nbytes_, used_nbytes_);
    const auto found =
        std::find_if(kept_.begin(), kept_.end(), [&](const Block& block) { return block.nbytes == nbytes; });
    if (found != kept_.end()) {
        const Block block = *found;
        kept_.erase(found);
        kept_nbytes_ -= nbytes;
        return block;
    }
    void* data = std::aligned_alloc(kAlignment, nbytes);
    if (data == nullptr) {
        used_nbytes_ -= nbytes;
        throw std::bad_alloc();
    }
    return {data, nbytes};
}

void Recycled::give(Block block) {
    std::lock_guard lock(mutex_);
    used_nbytes_ -= block.nbytes;
    kept_nbytes_ += block.nbytes;
    kept_.push_front(block);
    while (kept_nbytes_ > most_nbytes_) drop_oldest();
}

void Recycled::release() {
    std::lock_guard lock(mutex_);
    while (!kept_.empty()) drop_oldest();
    most_nbytes_ = used_nbytes_;
}

std::size_t Recycled::kept_nbytes() const {
    std::lock_guard lock(mutex_);
    return kept_nbytes_;
}

void Recycled::drop_oldest() {
    std::free(kept_.back().data);
    kept_nbytes_ -= kept_.back().nbytes;
    kept_.pop_back();
}

Recycled& Recycled::instance() {
    static Recycled* all = new Recycled;  // never destroyed: arrays may outlive every static object
    return *all;
}

}  // namespace tacit
