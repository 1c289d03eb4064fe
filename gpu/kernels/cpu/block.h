// One CUDA block: its threads are fibres that run in random order from barrier to barrier.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <memory>
#include <vector>

#include "fibre.h"
#include "types.h"

// CUDA's built-in variables for the running thread.
inline thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace shim {

constexpr unsigned kWarp = 32;

// The registers that a thread passes to its warp at a time: as many as an mma reads.
struct Words {
    uint32_t at[6];
};

// The error message; only the first error is kept.
struct Fault {
    char *text;
    size_t size;
    bool raised = false;

    void raise(const char *format, va_list values) {
        if (!raised) std::vsnprintf(text, size, format, values);
        raised = true;
    }
};

// xorshift64*: the order of threads and the moment of copies, from the launch's seed.
struct Dice {
    uint64_t state;
    unsigned below(unsigned bound) {
        state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
        return static_cast<unsigned>((state * 0x2545f4914f6cdd1dull >> 32) * bound >> 32);
    }
};

// A cp.async that is issued but not yet executed.
struct PendingCopy {
    void *to;
    const void *from;  // nullptr: zeros
    unsigned group;
};

struct Thread {
    Fibre fibre;
    dim3 index;
    unsigned rank = 0;
    unsigned exchanges = 0;
    unsigned copy_group = 0;
    std::vector<PendingCopy> copies;
};

// Deposited by all threads of a warp, then read by all. Two slots alternate: when a thread deposits in the same slot
// again, all threads have reached the other slot and have therefore read this one.
struct Warp {
    unsigned threads = 0;
    std::vector<unsigned> ready, waiting;
    Words words[2][kWarp];
};

// A warp runs as far as it can before the next warp runs, and the order of the warps is redrawn from time to time. One
// warp therefore gets far ahead of another unless a barrier stops it. Within a warp any ready thread may run next.
class Block {
  public:
    Dice dice;

    Block(dim3 shape, Fault &fault, uint64_t seed) : dice{seed | 1}, fault_(fault) {
        size_ = shape.x * shape.y * shape.z;
        threads_ = std::make_unique<Thread[]>(size_);
        warps_.resize((size_ + kWarp - 1) / kWarp);
        for (unsigned rank = 0; rank < size_; ++rank) {
            threads_[rank].rank = rank;
            threads_[rank].index = {rank % shape.x, rank / shape.x % shape.y, rank / (shape.x * shape.y)};
            ++warps_[rank / kWarp].threads;
        }
        for (unsigned warp = 0; warp < warps_.size(); ++warp) order_.push_back(warp);
    }

    // Runs to completion or to a fault.
    void run(void (*entry)()) {
        at_barrier_.clear();
        for (Warp &warp : warps_) warp.waiting.clear(), warp.ready.clear();
        for (unsigned rank = 0; rank < size_; ++rank) {
            threads_[rank].fibre.begin(entry);
            threads_[rank].exchanges = threads_[rank].copy_group = 0;
            threads_[rank].copies.clear();
            warps_[rank / kWarp].ready.push_back(rank);
        }
        ended_ = 0;
        shuffle_order();
        for (Warp *warp = next(); warp && !fault_.raised; warp = next()) step(warp->ready);
        if (!fault_.raised && ended_ < size_) report_deadlock();
    }

    Thread &running() { return *running_; }

    void barrier() {
        at_barrier_.push_back(running_->rank);
        if (at_barrier_.size() < size_) return running_->fibre.suspend();
        release(at_barrier_);
    }

    // Deposits `given`; returns what the warp's threads deposited.
    const Words *exchange(const Words &given) {
        Warp &warp = warps_[running_->rank / kWarp];
        Words *words = warp.words[running_->exchanges++ % 2];
        words[running_->rank % kWarp] = given;
        warp.waiting.push_back(running_->rank);
        if (warp.waiting.size() < warp.threads)
            running_->fibre.suspend();
        else
            release(warp.waiting);
        return words;
    }

    unsigned warp_threads() const { return warps_[running_->rank / kWarp].threads; }

    void end() {
        ++ended_;
        running_->fibre.suspend();
    }

    // Reports a fault; the running thread does not continue.
    __attribute__((format(printf, 2, 3))) void fail(const char *format, ...) {
        va_list values;
        va_start(values, format);
        fault_.raise(format, values);
        va_end(values);
        running_->fibre.suspend();
    }

  private:
    Fault &fault_;
    unsigned size_, ended_ = 0;
    std::unique_ptr<Thread[]> threads_;
    std::vector<Warp> warps_;
    std::vector<unsigned> order_, at_barrier_;
    Thread *running_ = nullptr;

    void shuffle_order() {
        for (unsigned rest = static_cast<unsigned>(order_.size()); rest > 1; --rest)
            std::swap(order_[dice.below(rest)], order_[rest - 1]);
    }

    // The first warp of the order with a thread that can run.
    Warp *next() {
        if (dice.below(256) == 0) shuffle_order();
        for (unsigned warp : order_)
            if (!warps_[warp].ready.empty()) return &warps_[warp];
        return nullptr;
    }

    void step(std::vector<unsigned> &ready) {
        std::swap(ready[dice.below(static_cast<unsigned>(ready.size()))], ready.back());
        running_ = &threads_[ready.back()];
        ready.pop_back();
        threadIdx = running_->index;
        running_->fibre.resume();
    }

    // Wakes all threads except the last one to arrive, which continues.
    void release(std::vector<unsigned> &waiting) {
        waiting.pop_back();
        for (unsigned rank : waiting) warps_[rank / kWarp].ready.push_back(rank);
        waiting.clear();
    }

    void report_deadlock() {
        const size_t at_barrier = at_barrier_.size(), at_exchange = size_ - ended_ - at_barrier;
        char text[160];
        std::snprintf(text, sizeof text,
                      "deadlock: of %u threads %zu wait at __syncthreads, %zu at a warp's exchange, %u have ended",
                      size_, at_barrier, at_exchange, ended_);
        raise("%s", text);
    }

    void raise(const char *format, ...) {
        va_list values;
        va_start(values, format);
        fault_.raise(format, values);
        va_end(values);
    }
};

inline thread_local Block *block = nullptr;

}  // namespace shim
