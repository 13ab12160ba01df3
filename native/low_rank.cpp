#include "low_rank.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "blocks.h"
#include "low_rank_kernels.h"
#include "refuse.h"
#include "stream.h"
#include "workers.h"

namespace tacit {
namespace {

using std::size_t;

constexpr size_t share = size_t(1) << 15;                 // elements that are worth a thread's while
constexpr size_t past_caches = size_t(1) << 21;           // elements of a result that caches would not keep
constexpr size_t narrowest = 128;                         // columns of a share: less is slow to read
constexpr double dependent = 1e-5;                        // of its norm: what rounding leaves of a column
constexpr std::uint64_t row_key = 0x9e3779b97f4a7c15;     // between the seeds of two columns
constexpr std::uint64_t factor_key = 0xd1b54a32d192ed03;  // and of two factors

// blocks.cpp picks the instruction set.
const LowRankKernels& chosen() {
#ifdef TACIT_X86
    const std::string name = simd();
    if (name == avx512::low_rank_kernels.name) return avx512::low_rank_kernels;
    if (name == avx2::low_rank_kernels.name) return avx2::low_rank_kernels;
#endif
    return baseline::low_rank_kernels;
}

// Floats that kernels load as whole registers.
class Aligned {
  public:
    explicit Aligned(size_t n) : at_(static_cast<float*>(operator new(n * sizeof(float), line))) {}

    float* data() { return at_.get(); }

  private:
    static constexpr std::align_val_t line{64};
    struct Free {
        void operator()(float* at) const { operator delete(at, line); }
    };
    std::unique_ptr<float, Free> at_;
};

void check_rank(size_t rank) {
    if (rank < 1 || rank > most_rank) refuse("rank=", rank, ": from 1 to ", most_rank);
}

void check_numel(const char* name, size_t size, size_t rows, size_t columns) {
    if (size != rows * columns)
        refuse(name, " has ", size, " elements: a matrix of ", rows, " x ", columns, " has ", rows * columns);
}

template <class P, class Q>
void check(size_t x, size_t e, const Factor<P>& p, const Factor<Q>& q, int threads) {
    check_rank(p.rank);
    if (q.rank != p.rank) refuse("p has rank ", p.rank, " and q has rank ", q.rank, ": both have the same");
    check_numel("x", x, p.length, q.length);
    check_numel("e", e, p.length, q.length);
    if (threads < 1 || threads > 1024) refuse("threads=", threads, ": from 1 to 1024");
}

// Rows or columns of `length` that make a share: a multiple of `step`.
size_t share_of(size_t length, size_t step) { return (share / length / step + 1) * step; }

}  // namespace

void low_rank_left(std::span<const float> x, std::span<const float> e, Factor<const float> q, Factor<float> p,
                   int threads) {
    check(x.size(), e.size(), p, q, threads);
    if (x.empty()) return;
    const LowRankKernels& kernels = chosen();
    const ErrorMatrix m{x.data(), e.data(), p.length, q.length};
    Aligned packed(kernels.left_floats(q.rank, q.length));
    kernels.pack_left(q.all.data(), q.rank, q.length, packed.data());
    share_out(m.rows, share_of(m.columns, 4), size_t(threads), [&](size_t, size_t begin, size_t end) {
        kernels.left(m, packed.data(), q.rank, begin, end, p.all.data());
    });
}

void low_rank_right(std::span<const float> x, std::span<const float> e, Factor<const float> p,
                    Factor<float> q, int threads) {
    check(x.size(), e.size(), p, q, threads);
    if (x.empty()) return;
    const LowRankKernels& kernels = chosen();
    const ErrorMatrix m{x.data(), e.data(), p.length, q.length};
    share_out(m.columns, share_of(m.rows, narrowest), size_t(threads), [&](size_t, size_t begin, size_t end) {
        kernels.right(m, p.all.data(), p.rank, begin, end, q.all.data());
    });
}

void low_rank_finish(std::span<const float> x, std::span<float> e, Factor<const float> p,
                     Factor<const float> own, Factor<const float> total, std::span<float> out, int threads) {
    check(x.size(), e.size(), p, own, threads);
    if (total.rank != own.rank || total.length != own.length)
        refuse("own is ", own.rank, " x ", own.length, " and total is ", total.rank, " x ", total.length,
               ": both have the same shape");
    check_numel("out", out.size(), p.length, own.length);
    if (x.empty()) return;
    const LowRankKernels& kernels = chosen();
    const ErrorMatrix m{x.data(), e.data(), p.length, own.length};
    Aligned packed(kernels.finish_floats(p.rank, m.columns));
    kernels.pack_finish(own.all.data(), total.all.data(), p.rank, m.columns, packed.data());
    const bool past = x.size() >= past_caches && m.columns % 16 == 0 && std::uintptr_t(out.data()) % 64 == 0;
    const auto finish = past ? kernels.finish_past : kernels.finish;
    share_out(m.rows, share_of(m.columns, 4), size_t(threads), [&](size_t, size_t begin, size_t end) {
        finish(m, p.all.data(), packed.data(), p.rank, begin, end, e.data(), out.data());
    });
}

// ---- orthonormalize

namespace {

// One column in doubles, whose squares neither overflow nor vanish for any float.
class Column {
  public:
    Column(const LowRankKernels& kernels, size_t length)
        : kernels_(kernels), length_(length), v_((length + 15) / 16 * 16) {}

    void take(const float* from) { std::copy(from, from + length_, v_.begin()); }

    // From [-1/2, 1/2), and never 0: a column of one element is to have a direction too.
    void draw(std::uint64_t seed) {
        const Stream random(seed, 0);
        for (std::uint32_t i = 0; i < length_; ++i) v_[i] = (double(random(i) >> 8) + 0.5) * 0x1p-24 - 0.5;
    }

    double norm() { return std::sqrt(kernels_.project(v_.data(), nullptr, 0, nullptr, length_)); }

    // Takes off its part in the span of `count` orthonormal columns, in one pass for each; its norm after
    // that.
    double without(const float* others, size_t count) {
        const auto other = [&](size_t k) { return k < 2 * count ? others + k % count * length_ : nullptr; };
        double sum = kernels_.project(v_.data(), nullptr, 0, other(0), length_);
        for (size_t k = 0; k < 2 * count; ++k)  // twice is enough
            sum = kernels_.project(v_.data(), other(k), sum, other(k + 1), length_);
        return std::sqrt(sum);
    }

    void put(double norm, float* to) const {
        for (size_t i = 0; i < length_; ++i) to[i] = float(v_[i] / norm);
    }

  private:
    const LowRankKernels& kernels_;
    size_t length_;
    std::vector<double> v_;
};

}  // namespace

size_t low_rank_orthonormalize(Factor<float> p, std::uint64_t seed) {
    check_rank(p.rank);
    if (p.length > std::numeric_limits<std::uint32_t>::max())
        refuse("p has columns of ", p.length, " elements: at most ",
               std::numeric_limits<std::uint32_t>::max());
    if (p.all.empty()) return 0;
    if (!std::all_of(p.all.begin(), p.all.end(), [](float x) { return std::isfinite(x); })) {
        std::fill(p.all.begin(), p.all.end(), std::numeric_limits<float>::quiet_NaN());
        return 0;
    }
    float* const columns = p.all.data();
    const size_t independent = std::min(p.rank, p.length);
    size_t replaced = p.rank - independent;
    Column column(chosen(), p.length);
    for (size_t k = 0; k < independent; ++k) {
        float* const own = columns + k * p.length;
        column.take(own);
        const double before = column.norm();
        double after = column.without(columns, k);
        if (after <= dependent * before) {
            column.draw(seed + k * row_key);
            after = column.without(columns, k);
            ++replaced;
        }
        column.put(after, own);
    }
    std::fill(columns + independent * p.length, p.all.data() + p.all.size(), 0.0f);
    return replaced;
}

// ---- many matrices

namespace {

struct Place {
    size_t start, rows, columns, rank;

    template <class Float>
    std::span<Float> of(std::span<Float> x) const {
        return x.subspan(start, rows * columns);
    }
};

// The next factor of a vector in which they lie one behind the other.
template <class Float>
class Factors {
  public:
    Factors(const char* name, std::span<Float> all) : name_(name), all_(all) {}

    Factor<Float> next(size_t rank, size_t length) {
        if (length && rank > (all_.size() - at_) / length)
            refuse(name_, " has ", all_.size(), " elements: too few for its factors");
        const Factor<Float> found{all_.subspan(at_, rank * length), rank, length};
        at_ += rank * length;
        return found;
    }

    void check_end() const {
        if (at_ != all_.size()) refuse(name_, " has ", all_.size(), " elements: its factors have ", at_);
    }

  private:
    const char* name_;
    std::span<Float> all_;
    size_t at_ = 0;
};

// Calls work with every matrix, each of which lies within a vector of `numel`.
template <class Work>
void by_matrix(Matrices matrices, size_t numel, Work work) {
    if (matrices.size() % 4) refuse("matrices have four numbers each: start, rows, columns and rank");
    for (size_t at = 0; at < matrices.size(); at += 4) {
        const auto start = matrices[at], rows = matrices[at + 1], columns = matrices[at + 2],
                   rank = matrices[at + 3];
        const auto most = std::int64_t(numel);
        if (start < 0 || rows < 0 || columns < 0 || rank < 1 || start > most ||
            (columns && rows > (most - start) / columns))
            refuse("a matrix of ", rows, " x ", columns, " of rank ", rank, " from ", start,
                   " does not lie in a vector of ", numel);
        work(Place{size_t(start), size_t(rows), size_t(columns), size_t(rank)});
    }
}

}  // namespace

void low_rank_lefts(std::span<const float> x, std::span<const float> e, Matrices matrices,
                    std::span<const float> q, std::span<float> p, int threads) {
    Factors rights("q", q);
    Factors lefts("p", p);
    by_matrix(matrices, std::min(x.size(), e.size()), [&](const Place& m) {
        low_rank_left(m.of(x), m.of(e), rights.next(m.rank, m.columns), lefts.next(m.rank, m.rows), threads);
    });
    rights.check_end();
    lefts.check_end();
}

void low_rank_rights(std::span<const float> x, std::span<const float> e, Matrices matrices,
                     std::span<const float> p, std::span<float> q, int threads) {
    Factors rights("q", q);
    Factors lefts("p", p);
    by_matrix(matrices, std::min(x.size(), e.size()), [&](const Place& m) {
        low_rank_right(m.of(x), m.of(e), lefts.next(m.rank, m.rows), rights.next(m.rank, m.columns), threads);
    });
    rights.check_end();
    lefts.check_end();
}

void low_rank_finishes(std::span<const float> x, std::span<float> e, Matrices matrices,
                       std::span<const float> p, std::span<const float> own, std::span<const float> total,
                       std::span<float> out, int threads) {
    Factors lefts("p", p), owns("own", own), totals("total", total);
    by_matrix(matrices, std::min({x.size(), e.size(), out.size()}), [&](const Place& m) {
        low_rank_finish(m.of(x), m.of(e), lefts.next(m.rank, m.rows), owns.next(m.rank, m.columns),
                        totals.next(m.rank, m.columns), m.of(out), threads);
    });
    lefts.check_end();
    owns.check_end();
    totals.check_end();
}

size_t low_rank_orthonormalize_all(std::span<float> p, std::span<const std::int64_t> shapes,
                                   std::uint64_t seed) {
    if (shapes.size() % 2) refuse("shapes have two numbers each: rank and length");
    Factors factors("p", p);
    size_t replaced = 0;
    for (size_t at = 0; at < shapes.size(); at += 2) {
        if (shapes[at] < 1 || shapes[at + 1] < 0)
            refuse("a factor of rank ", shapes[at], " and length ", shapes[at + 1],
                   ": rank is 1 or more, and length 0 or more");
        replaced += low_rank_orthonormalize(factors.next(size_t(shapes[at]), size_t(shapes[at + 1])),
                                            seed + at / 2 * factor_key);
    }
    factors.check_end();
    return replaced;
}

}  // namespace tacit
