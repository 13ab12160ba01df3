// Memory for arrays that come and go with every step: an array that is freed leaves its memory to the next of
// its size.
//
// A page that a process touches for the first time is a fault, which costs several times what it takes to
// fill the page. malloc gives large arrays back to the system as soon as they are freed, above all in
// threads, so an exchange would fault all of its memory in every step.
#pragma once

#include <cstddef>
#include <list>
#include <mutex>

namespace tacit {

class Recycled {
  public:
    struct Block {
        void* data;
        std::size_t nbytes;  // rounded up: at most an eighth more than was asked for
    };

    // At least `nbytes` of memory, aligned to 64 bytes, with anything in it. Throws std::bad_alloc.
    Block take(std::size_t nbytes);

    // Frees what lies here longest once there is more of it than was ever in use at a time.
    void give(Block block);

    // Frees all that nobody uses.
    void release();

    std::size_t kept_nbytes() const;

    static Recycled& instance();

  private:
    void drop_oldest();

    mutable std::mutex mutex_;
    std::list<Block> kept_;  // the one given last in front
    std::size_t kept_nbytes_ = 0, used_nbytes_ = 0, most_nbytes_ = 0;
};

}  // namespace tacit
