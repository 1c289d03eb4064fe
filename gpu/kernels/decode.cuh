// What both decoders are made of: the threads of a block, scores in base 2, and what a warp hands in at the end.
#pragma once

#include "attention.cuh"
#include "scalar.cuh"

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;

// The attention of each warp over its own tokens.
template <int kHeadDim, int kGroup> struct WarpResults {
    float2 states[kWarps][kGroup];  // maximum and sum
    float values[kWarps][kGroup][kHeadDim];
};
