// Launches kernels over torch tensors: on their GPU by nvcc's syntax, or through the kernels' CPU build if a host
// compiler compiles this (the tests do).
#pragma once

#include <torch/types.h>

#include <vector>

#ifdef __CUDACC__
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#else
#include <tuple>

#include "../cpu/shim.h"
#endif

namespace fragmeter {

#ifdef __CUDACC__

constexpr auto kDevice = torch::kCUDA;

// Launches on torch's current stream of the tensors' device, which is the current device during this object's lifetime.
class Launcher {
  public:
    explicit Launcher(const std::vector<torch::Tensor> &tensors) : guard_(tensors.front().device()) {}

    // Number of resident blocks of the kernel on the device.
    template <class... Parameters> int places(void (*kernel)(Parameters...), int threads, int shared_bytes) const {
        prepare(kernel, shared_bytes);
        int multiprocessors, blocks;
        const int device = guard_.current_device().index();
        C10_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
        C10_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared_bytes));
        return multiprocessors * blocks;
    }

    torch::Tensor empty(c10::IntArrayRef extents, const torch::TensorOptions &options) {
        return torch::empty(extents, options);
    }

    template <class... Parameters, class... Arguments>
    void run(void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes, Arguments... arguments) const {
        prepare(kernel, shared_bytes);
        kernel<<<grid, threads, shared_bytes, c10::cuda::getCurrentCUDAStream()>>>(Parameters(arguments)...);
        C10_CUDA_KERNEL_LAUNCH_CHECK();
    }

  private:
    c10::cuda::CUDAGuard guard_;

    // As fragmeter.gpu.cuda_kernels: more than 48 KiB needs an opt-in, and the L1 cache is not needed.
    template <class Kernel> static void prepare(Kernel *kernel, int shared_bytes) {
        if (shared_bytes > 48 * 1024)
            C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
        if (shared_bytes)
            C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, 100));
    }
};

#else

constexpr auto kDevice = torch::kCPU;

// Launches through the shim; the kernel may access only these tensors.
class Launcher {
  public:
    explicit Launcher(const std::vector<torch::Tensor> &tensors) {
        for (const torch::Tensor &tensor : tensors) add(tensor);
    }

    // As fragmeter.gpu.cpu_kernels.
    template <class Kernel> int places(Kernel *, int threads, int shared_bytes) const {
        return 8 * std::min(2048 / threads, 164 * 1024 / (shared_bytes + 1024));
    }

    torch::Tensor empty(c10::IntArrayRef extents, const torch::TensorOptions &options) {
        torch::Tensor made = torch::empty(extents, options);
        add(made);
        return made;
    }

    template <class... Parameters, class... Arguments>
    void run(void (*kernel)(Parameters...), dim3 grid, unsigned threads, unsigned shared_bytes,
             Arguments... arguments) const {
        std::tuple<Parameters...> values{Parameters(arguments)...};
        std::apply(
            [&](auto &...each) {
                void *places[] = {&each...};
                char message[512];
                const auto count = static_cast<unsigned>(ranges_.size());
                const shim::Launch launch{grid,  {threads}, 1, shared_bytes, count, ranges_.data(), places,
                                          message, sizeof message};
                TORCH_CHECK(!shim::launch(kernel, launch), message);
            },
            values);
    }

  private:
    std::vector<shim::Range> ranges_;

    void add(const torch::Tensor &tensor) {
        ranges_.push_back({reinterpret_cast<uintptr_t>(tensor.data_ptr()), tensor.nbytes()});
    }
};

#endif

}  // namespace fragmeter
