// Division of the work of decode attention among the blocks of a grid that run at the same time, and the merge of sequences that
// several blocks share.
//
// Work is counted in granules: kGranule tokens of a sequence for one column, which is a KV head and up to kGroup of its query heads.
// All granules are in one row, and each block takes a range of it. Ranges are equally long, or one granule longer:
//
//   column 0                                  column 1
//   | sequence 0      | 1  | 2   | 3        | sequence 0      | 1  | 2   | 3        |
//   | block 0    | block 1    | block 2    | block 3    | block 4    | block 5      |
//
// So a block has whole sequences, and at either end of its range at most one piece of a sequence that other blocks share. Its two
// slots of partial results are one for the first piece of a sequence, which ends its range, and one for any other piece.
//
// The pieces of a sequence are merged as a tree. Up to kFanIn neighbours are a group; the block of a group that finishes last
// merges them in their order, and continues with the group of this group. Neither the tree nor an order depends on who is last.
#pragma once

#include "decode.cuh"

constexpr int kGranule = 64;  // a multiple of the tokens that the warps of a block take at once, at most 64
constexpr int kLeastGranules = 4;  // of a block on average, unless it is a sequence: with less a merge costs too much
constexpr int kFanIn = 8;
static_assert(kThreads / kFanIn == 16, "a thread for each piece of a group and each of up to 16 heads");

// An empty sequence has a granule too: somebody writes its zeros.
__device__ __forceinline__ unsigned granules_of(int tokens) { return tokens > 0 ? ceil_div(tokens, kGranule) : 1; }

// The ranges of the blocks.
struct Ranges {
    unsigned each, longer;  // the first `longer` ones have a granule more

    __device__ __forceinline__ Ranges(unsigned granules, unsigned blocks)
        : each(granules / blocks), longer(granules % blocks) {}

    __device__ __forceinline__ unsigned begin(unsigned block) const { return block * each + min(block, longer); }

    __device__ __forceinline__ unsigned block_of(unsigned granule) const {
        return granule < longer * (each + 1) ? granule / (each + 1) : (granule - longer) / each;
    }
};

// The pieces of a sequence, which are of consecutive blocks.
struct Pieces {
    unsigned first, count, own;  // block of the first one, number of pieces, number of this block's

    __device__ __forceinline__ unsigned slot(unsigned piece) const { return 2 * (first + piece) + (piece == 0); }
};

// A column of a sequence: its rows in `query` and `out`.
struct Column {
    int number, sequence;

    __device__ __forceinline__ long long first_row(int kv_heads, int group, int tile) const {
        return ((long long)sequence * kv_heads + number % kv_heads) * group + number / kv_heads * tile;
    }
    __device__ __forceinline__ int rows(int kv_heads, int group, int tile) const {
        return min(tile, group - number / kv_heads * tile);
    }
};

// What is left of the range of a block, in shared memory: in the main loop all registers are needed.
struct Work {
    Ranges ranges;
    unsigned left;   // granules
    unsigned begin;  // where the column of the sequence begins in the row of all granules
    Column column;
    unsigned granule, granules;  // of the sequence: the first one that is left, and all

    __device__ __forceinline__ unsigned taken() const { return min(granules - granule, left); }
    __device__ __forceinline__ bool whole() const { return taken() == granules; }

    // The pieces of the sequence, if it is not whole.
    __device__ __forceinline__ Pieces pieces() const {
        const unsigned first = granule == 0 ? blockIdx.x : ranges.block_of(begin);
        return {first, ranges.block_of(begin + granules - 1) - first + 1, blockIdx.x - first};
    }

    __device__ __forceinline__ void next(const int *context_lens, int sequences) {
        left -= taken();
        begin += granules;
        granule = 0;
        if (++column.sequence == sequences) column = {column.number + 1, 0};
        if (left > 0) granules = granules_of(context_lens[column.sequence]);
    }
};

// Finds the range of this block, of which nothing is left if there are more blocks than work. Each thread counts the granules of
// consecutive sequences. All threads of the block call this.
__device__ __forceinline__ void find_work(Work &work, unsigned (&of_warps)[kWarps], const int *context_lens,
                                          int sequences, int columns) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int each = ceil_div(sequences, kThreads);
    const int first = min((int)threadIdx.x * each, sequences), last = min(first + each, sequences);
    unsigned own = 0;
    for (int sequence = first; sequence < last; ++sequence) own += granules_of(context_lens[sequence]);
    __syncwarp();
    unsigned through = own;  // with those of the lanes before
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const unsigned left = __shfl_sync(kFullWarp, through, (lane - distance) & 31);
        through += lane >= distance ? left : 0;
    }
    if (lane == 31) of_warps[warp] = through;
    __syncthreads();
    unsigned before = through - own, of_column = 0;
#pragma unroll
    for (int other = 0; other < kWarps; ++other) {
        before += other < warp ? of_warps[other] : 0;
        of_column += of_warps[other];
    }

    const unsigned all = of_column * columns, alone = (unsigned)columns * sequences;
    const unsigned useful = (all + kLeastGranules - 1) / kLeastGranules;
    const unsigned blocks = min(gridDim.x, alone > useful ? alone : useful);
    const Ranges ranges(all, blocks);
    const unsigned begin = ranges.begin(blockIdx.x), within = begin % of_column;
    if (before <= within && within < before + own) {  // one thread
        int sequence = first;
        unsigned granules = granules_of(context_lens[sequence]);
        while (within - before >= granules) {
            before += granules;
            granules = granules_of(context_lens[++sequence]);
        }
        const unsigned left = blockIdx.x < blocks ? ranges.begin(blockIdx.x + 1) - begin : 0;
        const unsigned granule = within - before;
        work = {ranges, left, begin - granule, {(int)(begin / of_column), sequence}, granule, granules};
    }
    __syncthreads();
}

// The memory for partial results: two slots for each block of the grid. `counters` has as many for each level of the tree. They
// are zeros before the first launch; each is zero again when its group is complete.
template <int kHeadDim, int kGroup> struct Partials {
    float2 *states;  // [slots, kGroup]: maximum and sum, base 2
    float *values;   // [slots, kGroup, kHeadDim]: weighted, not divided
    unsigned *counters;

    __device__ __forceinline__ float2 *state(unsigned slot) const { return states + slot * kGroup; }
    __device__ __forceinline__ float *value(unsigned slot) const { return values + (long long)slot * (kGroup * kHeadDim); }
};

// Of a group of pieces that a block merges.
template <int kGroup> struct Merging {
    unsigned last;
    float factors[kGroup][kFanIn];
    float2 states[kGroup];
};

// Hands in this block's piece, which its threads have written to `partials`. The block that completes the sequence writes `out`,
// `heads` rows. All threads of the block call this; `merging` is free.
template <class Scalar, int kHeadDim, int kGroup>
__device__ __forceinline__ void merge_piece(Scalar *out, const Partials<kHeadDim, kGroup> &partials, const Pieces &pieces,
                                            int heads, Merging<kGroup> &merging) {
    unsigned *counters = partials.counters;
    for (unsigned stride = 1;; stride *= kFanIn, counters += 2 * gridDim.x) {
        const unsigned leader = pieces.own / (stride * kFanIn) * (stride * kFanIn);
        const unsigned members = min((unsigned)kFanIn, (pieces.count - leader + stride - 1) / stride);
        const unsigned target = pieces.slot(leader);
        __syncthreads();  // all threads have written
        if (threadIdx.x == 0) {
            // The first fence makes the writes of the block visible before the count is, the second one those of the blocks that
            // have counted before.
            __threadfence();
            merging.last = atomicInc(counters + target, members - 1) == members - 1;
            __threadfence();
        }
        __syncthreads();
        if (!merging.last) return;

        const unsigned which = threadIdx.x / kFanIn, member = threadIdx.x % kFanIn;
        const bool there = which < heads && member < members;
        const float2 *states = partials.state(pieces.slot(leader + (there ? member * stride : 0)));
        const float2 state = there ? states[which] : make_float2(kMasked, 0);
        __syncwarp();
        float maximum = state.x;
#pragma unroll
        for (int distance = kFanIn / 2; distance > 0; distance /= 2)
            maximum = fmaxf(maximum, __shfl_xor_sync(kFullWarp, maximum, distance));
        const float factor = ptx::exp2(state.x - maximum);
        float sum = state.y * factor;
#pragma unroll
        for (int distance = kFanIn / 2; distance > 0; distance /= 2)
            sum += __shfl_xor_sync(kFullWarp, sum, distance);
        if (which < kGroup) {
            merging.factors[which][member] = factor;
            if (member == 0) merging.states[which] = make_float2(maximum, sum);
        }
        __syncthreads();

        const bool complete = leader == 0 && stride * kFanIn >= pieces.count;
        for (int place = 4 * threadIdx.x; place < heads * kHeadDim; place += 4 * kThreads) {
            float4 batch[kFanIn];
#pragma unroll
            for (int member = 0; member < kFanIn; ++member) {
                const float *values = partials.value(pieces.slot(leader + member * stride)) + place;
                batch[member] = member < members ? *reinterpret_cast<const float4 *>(values) : make_float4(0, 0, 0, 0);
            }
            const float *factors = merging.factors[place / kHeadDim];
            float value[4] = {};
#pragma unroll
            for (int member = 0; member < kFanIn; ++member) {
                const float factor = member < members ? factors[member] : 0;
                value[0] += batch[member].x * factor;
                value[1] += batch[member].y * factor;
                value[2] += batch[member].z * factor;
                value[3] += batch[member].w * factor;
            }
            const float sum = merging.states[place / kHeadDim].y;
#pragma unroll
            for (int number = 0; number < 4; ++number)
                if (complete)
                    out[place + number] = FromFloat<Scalar>::of(value[number] / sum);
                else
                    partials.value(target)[place + number] = value[number];
        }
        if (complete) return;
        if (threadIdx.x < heads) partials.state(target)[threadIdx.x] = merging.states[threadIdx.x];
    }
}
