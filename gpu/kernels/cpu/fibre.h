// A fibre: a stack and an execution point. A switch costs a few nanoseconds on x86-64, a system call elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>

#if defined(__x86_64__)
// The System V ABI lets a callee change all registers but these six and the stack pointer.
extern "C" void fragmeter_switch(void **from, void *to) __attribute__((visibility("hidden")));
asm(R"(
    .pushsection .text
    .hidden fragmeter_switch
    .globl fragmeter_switch
    .type fragmeter_switch, @function
fragmeter_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size fragmeter_switch, . - fragmeter_switch
    .popsection
)");
#else
#include <ucontext.h>
#endif

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace shim {

#ifdef __SANITIZE_ADDRESS__
constexpr size_t kStackBytes = 512 * 1024;  // frames have red zones
#else
constexpr size_t kStackBytes = 64 * 1024;
#endif

class Fibre {
  public:
    Fibre() : stack_(static_cast<char *>(std::malloc(kStackBytes))) {}
    ~Fibre() { std::free(stack_); }
    Fibre(const Fibre &) = delete;
    Fibre &operator=(const Fibre &) = delete;

    // The next resume() starts `entry`, which must not return: its last call is suspend().
    void begin(void (*entry)()) {
#ifdef __SANITIZE_ADDRESS__
        __asan_unpoison_memory_region(stack_, kStackBytes);  // frames that never returned
#endif
#if defined(__x86_64__)
        // As if `entry` had been called: above its return address (none) the stack is aligned to 16.
        auto top = reinterpret_cast<uintptr_t>(stack_ + kStackBytes) & ~uintptr_t{15};
        auto *words = reinterpret_cast<void **>(top) - 8;
        for (int register_ = 0; register_ < 6; ++register_) words[register_] = nullptr;
        words[6] = reinterpret_cast<void *>(entry);
        words[7] = nullptr;
        here_ = words;
#else
        getcontext(&here_);
        here_.uc_stack.ss_sp = stack_;
        here_.uc_stack.ss_size = kStackBytes;
        here_.uc_link = nullptr;
        makecontext(&here_, entry, 0);
#endif
    }

#if defined(__x86_64__)
    void resume() { fragmeter_switch(&resumer_, here_); }
    void suspend() { fragmeter_switch(&here_, resumer_); }
#else
    void resume() { swapcontext(&resumer_, &here_); }
    void suspend() { swapcontext(&here_, &resumer_); }
#endif

  private:
    char *stack_;
#if defined(__x86_64__)
    void *here_ = nullptr, *resumer_ = nullptr;
#else
    ucontext_t here_, resumer_;
#endif
};

}  // namespace shim
