#include "workers.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <list>
#include <mutex>
#include <thread>

namespace tacit {
namespace {

using std::size_t;

struct Loop {
    const Shares& work;
    size_t units, step, workers;
    size_t wanted;  // others that may still join
    size_t joined = 0;
    std::atomic<size_t> at_work = 0;  // others that have joined and are not done
    std::atomic<size_t> next = 0;

    void run(size_t worker) {
        for (size_t begin = next; begin < units;) {
            // Large shares first, because what lies together is quicker; small ones last, for an even end.
            const size_t share = std::max<size_t>(1, (units - begin) / (4 * workers) / step) * step;
            const size_t end = std::min(begin + share, units);
            if (!next.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
            work(worker, begin, end);
            begin = next;
        }
    }
};

// Tells the core that this is a loop that waits.
inline void rest() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Waits until it `happened`, but at most some 50 us: to fall asleep and be woken costs as much again, in a
// virtual machine more.
template <class Happened>
void wait_a_little(Happened happened) {
    using Clock = std::chrono::steady_clock;
    for (const auto until = Clock::now() + std::chrono::microseconds(50); !happened();) {
        for (int i = 0; i < 32; ++i) rest();
        if (Clock::now() >= until) return;
    }
}

struct Blocked {
    sigset_t before;

    explicit Blocked(const sigset_t& signals) { pthread_sigmask(SIG_BLOCK, &signals, &before); }
    ~Blocked() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
};

class Pool {
  public:
    void run(Loop& loop) {
        const size_t others = loop.wanted;
        {
            const std::lock_guard lock(mutex_);
            while (threads_ < others && start()) ++threads_;
            loops_.push_back(&loop);
            ++posted_;
        }
        for (size_t i = 0; i < others; ++i) news_.notify_one();
        loop.run(0);
        {
            const std::lock_guard lock(mutex_);
            loops_.remove(&loop);
        }
        const auto done = [&] { return loop.at_work == 0; };
        wait_a_little(done);
        std::unique_lock lock(mutex_);  // whoever was last has let go of `loop`
        done_.wait(lock, done);
    }

  private:
    // Signals are for the threads that Python knows, but for those that a thread brings upon itself.
    bool start() {
        sigset_t others;
        sigfillset(&others);
        for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&others, own);
        const Blocked while_it_starts(others);
        try {
            std::thread([this] { serve(); }).detach();
            return true;
        } catch (const std::exception&) {  // no room for one more: the callers do without
            return false;
        }
    }

    void serve() {
        for (std::unique_lock lock(mutex_);;) {
            const auto found =
                std::find_if(loops_.begin(), loops_.end(), [](const Loop* loop) { return loop->wanted > 0; });
            if (found == loops_.end()) {
                const size_t seen = posted_;
                const auto more = [&] { return posted_ != seen; };
                lock.unlock();
                wait_a_little(more);
                lock.lock();
                news_.wait(lock, more);
                continue;
            }
            Loop& loop = **found;
            --loop.wanted;
            ++loop.at_work;
            const size_t worker = ++loop.joined;
            lock.unlock();
            loop.run(worker);
            lock.lock();
            if (--loop.at_work == 0) done_.notify_all();  // `loop` may go as soon as the lock does
        }
    }

    std::mutex mutex_;
    std::condition_variable news_, done_;
    std::list<Loop*> loops_;
    size_t threads_ = 0;
    std::atomic<size_t> posted_ = 0;  // loops so far
};

// Made when the library is loaded, and never destroyed: its threads wait in it until the process ends. A
// forked child has none of them, and begins anew.
std::atomic<Pool*> pool = [] {
    pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
    return new Pool;
}();

}  // namespace

void share_out_among(size_t units, size_t step, size_t workers, const Shares& work) {
    Loop loop{work, units, step, workers, workers - 1};
    pool.load()->run(loop);
}

}  // namespace tacit
