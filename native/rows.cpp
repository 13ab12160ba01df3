#include "rows.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "blocks.h"
#include "refuse.h"
#include "row_index.h"
#include "row_kernels.h"
#include "workers.h"

namespace tacit {
namespace {

using std::int64_t;
using std::size_t;
using std::uint64_t;

constexpr size_t share = size_t(1) << 14;           // elements that are worth a thread's while
constexpr uint64_t golden = 0x9e3779b97f4a7c15;     // splitmix64's step
constexpr uint64_t owner_key = 0xd1b54a32d192ed03;  // between owners and values
constexpr int words = 3;                            // random words an element

// blocks.cpp picks the instruction set.
const RowKernels& chosen() {
#ifdef TACIT_X86
    const std::string name = simd();
    if (name == avx512::row_kernels.name) return avx512::row_kernels;
    if (name == avx2::row_kernels.name) return avx2::row_kernels;
#endif
    return baseline::row_kernels;
}

uint64_t key_bits(uint64_t table, int64_t key) { return mixed(mixed(table + golden) + uint64_t(key)); }

void check_size(const char* name, size_t size, size_t rows, size_t width) {
    if (size != rows * width)
        refuse(name, " has ", size, " elements: ", rows, " rows of ", width, " have ", rows * width);
}

void check_threads(int threads) {
    if (threads < 1 || threads > 1024) refuse("threads=", threads, ": from 1 to 1024");
}

size_t rows_of_share(size_t width) { return share / std::max<size_t>(width, 1) + 1; }

}  // namespace

void row_route(std::span<const int64_t> keys, uint64_t table, std::span<int64_t> order,
               std::span<int64_t> counts) {
    if (counts.empty()) refuse("counts has no element: one for each rank is needed");
    if (order.size() != keys.size())
        refuse("order has ", order.size(), " elements: there are ", keys.size(), " keys");
    const size_t world = counts.size();
    std::vector<std::uint32_t> owners(keys.size());
    std::fill(counts.begin(), counts.end(), 0);
    for (size_t i = 0; i < keys.size(); ++i) {
        owners[i] = std::uint32_t((key_bits(table, keys[i]) ^ owner_key) % world);
        ++counts[owners[i]];
    }
    std::vector<int64_t> next(world, 0);
    for (size_t rank = 1; rank < world; ++rank) next[rank] = next[rank - 1] + counts[rank - 1];
    for (size_t i = 0; i < keys.size(); ++i) order[size_t(next[owners[i]]++)] = int64_t(i);
}

void row_values(std::span<const int64_t> keys, uint64_t table, uint64_t seed, bool normal, float scale,
                size_t width, std::span<float> out, int threads) {
    check_size("out", out.size(), keys.size(), width);
    check_threads(threads);
    // Sixteen bits at a time, as integers: twelve of them have a mean of 12 x 32767.5 and a variance of 2^32.
    const auto sixteens = [](uint64_t word) {
        return int(word & 0xffff) + int(word >> 16 & 0xffff) + int(word >> 32 & 0xffff) + int(word >> 48);
    };
    share_out(keys.size(), rows_of_share(width), size_t(threads), [&](size_t, size_t begin, size_t end) {
        for (size_t i = begin; i < end; ++i) {
            const uint64_t row = mixed(key_bits(table, keys[i]) + mixed(seed));
            for (size_t k = 0; k < width; ++k) {
                const auto word = [&](size_t j) { return mixed(row + (words * k + j + 1) * golden); };
                float& to = out[i * width + k];
                if (normal)
                    to = float(sixteens(word(0)) + sixteens(word(1)) + sixteens(word(2)) - 393210) *
                         0x1p-16f * scale;
                else
                    to = float(int64_t(word(0) >> 40) - (1 << 23)) * 0x1p-23f * scale;
            }
        }
    });
}

// ---- sums

namespace {

// Positions of gradients by target, each target's in the order given.
struct Runs {
    std::vector<int64_t> order, starts;

    Runs(std::span<const int64_t> targets, size_t count) : order(targets.size()), starts(count + 1) {
        for (const int64_t target : targets) {
            if (target < 0 || size_t(target) >= count)
                refuse("target ", target, " is none of the ", count, " rows of out");
            ++starts[size_t(target) + 1];
        }
        for (size_t t = 0; t < count; ++t) starts[t + 1] += starts[t];
        std::vector<int64_t> next(starts.begin(), starts.end() - 1);
        for (size_t i = 0; i < targets.size(); ++i) order[size_t(next[size_t(targets[i])]++)] = int64_t(i);
    }
};

template <class Work>
void sum_rows(std::span<const float> gradients, std::span<const int64_t> targets, size_t width, double scale,
              float count, std::span<float> out, int threads, Work work) {
    if (!width) refuse("width=0: a row has at least one element");
    check_size("gradients", gradients.size(), targets.size(), width);
    check_size("out", out.size(), out.size() / width, width);
    check_threads(threads);
    const size_t total = out.size() / width;
    const Runs by_target(targets, total);
    const RowRuns runs{gradients.data(), by_target.order.data(), by_target.starts.data(), width, count, scale,
                       out.data()};
    share_out(total, rows_of_share(width), size_t(threads),
              [&](size_t worker, size_t begin, size_t end) { work(runs, worker, begin, end); });
}

}  // namespace

void row_sums(std::span<const float> gradients, std::span<const int64_t> targets, size_t width, float count,
              std::span<float> out, int threads) {
    const RowKernels& kernels = chosen();
    sum_rows(gradients, targets, width, 1.0, count, out, threads,
             [&](const RowRuns& runs, size_t, size_t begin, size_t end) { kernels.sums(runs, begin, end); });
}

void row_exact_sums(std::span<const float> gradients, std::span<const int64_t> targets, size_t width,
                    int exponent, float count, std::span<float> out, int threads) {
    if (exponent < -200 || exponent > 200) refuse("exponent=", exponent, ": from -200 to 200");
    check_threads(threads);
    const RowKernels& kernels = chosen();
    std::vector<int64_t> space(2 * width * size_t(threads));
    sum_rows(gradients, targets, width, std::ldexp(1.0, exponent), count, out, threads,
             [&](const RowRuns& runs, size_t worker, size_t begin, size_t end) {
                 kernels.exact_sums(runs, space.data() + worker * 2 * width, begin, end);
             });
}

// ---- optimizers

namespace {

void run(const UpdateRows (&kernel)[2], RowWeights weights, std::span<const int64_t> rows,
         std::span<const float> gradients, RowUpdate update, int threads) {
    check_size("gradients", gradients.size(), rows.size(), weights.width);
    check_threads(threads);
    int64_t before = -1;
    for (const int64_t row : rows) {
        if (row <= before || size_t(row) >= weights.rows)
            refuse("row ", row, " after ", before, ": rows increase, and there are ", weights.rows);
        before = row;
    }
    update.weights = weights.data;
    update.width = weights.width;
    update.rows = rows.data();
    update.gradients = gradients.data();
    share_out(rows.size(), rows_of_share(weights.width), size_t(threads),
              [&](size_t, size_t begin, size_t end) { kernel[weights.bf16](update, begin, end); });
}

}  // namespace

void row_sgd(RowWeights weights, std::span<const int64_t> rows, std::span<const float> gradients, float rate,
             int threads) {
    run(chosen().sgd, weights, rows, gradients, {.rate = rate}, threads);
}

void row_adagrad(RowWeights weights, std::span<float> squares, std::span<const int64_t> rows,
                 std::span<const float> gradients, float rate, float eps, int threads) {
    check_size("squares", squares.size(), weights.rows, weights.width);
    run(chosen().adagrad, weights, rows, gradients, {.first = squares.data(), .rate = rate, .eps = eps},
        threads);
}

void row_row_adagrad(RowWeights weights, std::span<float> squares, std::span<const int64_t> rows,
                     std::span<const float> gradients, float rate, float eps, int threads) {
    check_size("squares", squares.size(), weights.rows, 1);
    run(chosen().row_adagrad, weights, rows, gradients, {.first = squares.data(), .rate = rate, .eps = eps},
        threads);
}

void row_ftrl(RowWeights weights, std::span<float> z, std::span<float> squares, std::span<const int64_t> rows,
              std::span<const float> gradients, float rate, float beta, float l1, float l2, int threads) {
    check_size("z", z.size(), weights.rows, weights.width);
    check_size("squares", squares.size(), weights.rows, weights.width);
    run(chosen().ftrl, weights, rows, gradients,
        {.first = z.data(), .second = squares.data(), .rate = rate, .beta1 = beta, .l1 = l1, .l2 = l2},
        threads);
}

void row_lazy_adam(RowWeights weights, std::span<float> m, std::span<float> v, std::span<const int64_t> rows,
                   std::span<const float> gradients, float rate, float beta1, float beta2, float eps,
                   int threads) {
    check_size("m", m.size(), weights.rows, weights.width);
    check_size("v", v.size(), weights.rows, weights.width);
    run(chosen().lazy_adam, weights, rows, gradients,
        {.first = m.data(), .second = v.data(), .rate = rate, .beta1 = beta1, .beta2 = beta2, .eps = eps},
        threads);
}

}  // namespace tacit
