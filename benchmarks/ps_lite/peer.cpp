// One node of ps-lite (scheduler, server or worker, by DMLC_ROLE) that does what a training with sparse
// tables does: a worker pulls the rows of a batch, then pushes as many gradients, step by step. Built and
// started by benchmarks/ps_lite.py; ps-lite itself is not in this repository.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <unordered_map>
#include <vector>

#include "ps/ps.h"

namespace {

using Clock = std::chrono::steady_clock;

// Rows of one server, made on first touch; a push is a step of SGD.
struct Rows {
    explicit Rows(std::size_t width) : width(width) {}

    float* at(std::uint64_t key) {
        auto [found, made] = places.try_emplace(key, values.size());
        if (made) values.resize(values.size() + width, 1.0f);
        return values.data() + found->second;
    }

    void answer(const ps::KVMeta& request, const ps::KVPairs<float>& data, ps::KVServer<float>* server) {
        ps::KVPairs<float> response;
        if (request.push) {
            for (std::size_t i = 0; i < data.keys.size(); ++i) {
                float* row = at(data.keys[i]);
                for (std::size_t j = 0; j < width; ++j) row[j] -= 0.1f * data.vals[i * width + j];
            }
        } else {
            response.keys = data.keys;
            response.vals.resize(data.keys.size() * width);
            for (std::size_t i = 0; i < data.keys.size(); ++i) {
                const float* row = at(data.keys[i]);
                std::copy(row, row + width, response.vals.data() + i * width);
            }
        }
        server->Response(request, response);
    }

    std::size_t width;
    std::unordered_map<std::uint64_t, std::size_t> places;
    std::vector<float> values;
};

std::vector<std::uint64_t> keys_of(const std::string& path) {
    std::ifstream file(path, std::ios::binary | std::ios::ate);
    std::vector<std::uint64_t> keys(static_cast<std::size_t>(file.tellg()) / sizeof(std::uint64_t));
    file.seekg(0);
    file.read(reinterpret_cast<char*>(keys.data()),
              static_cast<std::streamsize>(keys.size() * sizeof(keys[0])));
    return keys;
}

// Each step's milliseconds on standard output, a line each.
void work(const std::string& folder, int rank, int steps, std::size_t width) {
    ps::KVWorker<float> worker(0, 0);
    for (int step = 0; step < steps; ++step) {
        const auto keys = keys_of(folder + "/" + std::to_string(rank) + "-" + std::to_string(step) + ".keys");
        const ps::SArray<ps::Key> wanted(keys);
        ps::SArray<float> rows, gradients(keys.size() * width, 1.0f);
        ps::Postoffice::Get()->Barrier(0, ps::kWorkerGroup);
        const auto start = Clock::now();
        worker.Wait(worker.ZPull(wanted, &rows));
        worker.Wait(worker.ZPush(wanted, gradients));
        ps::Postoffice::Get()->Barrier(0, ps::kWorkerGroup);
        std::printf("%.3f\n", std::chrono::duration<double, std::milli>(Clock::now() - start).count());
        std::fflush(stdout);
    }
}

}  // namespace

int main(int count, char** words) {
    if (count != 5) {
        std::fprintf(stderr, "usage: peer FOLDER RANK STEPS WIDTH\n");
        return 2;
    }
    const auto width = static_cast<std::size_t>(std::stoul(words[4]));
    Rows rows(width);
    ps::KVServer<float>* server = nullptr;
    ps::Start(0);
    if (ps::IsServer()) {
        server = new ps::KVServer<float>(0);
        server->set_request_handle([&](const ps::KVMeta& request, const ps::KVPairs<float>& data,
                                       ps::KVServer<float>* own) { rows.answer(request, data, own); });
    }
    if (ps::IsWorker()) work(words[1], std::stoi(words[2]), std::stoi(words[3]), width);
    ps::Finalize(0, true);
    delete server;
    return 0;
}
