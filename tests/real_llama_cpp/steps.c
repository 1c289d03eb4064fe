// Loaded before libllama: writes every batch down that an unmodified llama-server computes, and computes it when told to.
//
//   to FRAGMETER_STEPS_OUT    "0:1 2:37\n"  sequences of the batch and how many tokens of each, in order; then it waits
//   from FRAGMETER_STEPS_IN   one byte      compute it
//   to FRAGMETER_STEPS_OUT    "= 0\n"       the value that llama_process returned
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { LARGEST = 1 << 16 };
static int32_t sequences[LARGEST];
static int tokens;

static int descriptor(const char * name) {
    const char * value = getenv(name);
    return value ? atoi(value) : -1;
}

void llama_batch_ext_clear(void * batch) {
    static void (*real)(void *);
    if (!real) {
        real = (void (*)(void *)) dlsym(RTLD_NEXT, "llama_batch_ext_clear");
    }
    tokens = 0;
    real(batch);
}

int32_t llama_batch_ext_add_token(void * batch, int32_t sequence, int32_t token) {
    static int32_t (*real)(void *, int32_t, int32_t);
    if (!real) {
        real = (int32_t (*)(void *, int32_t, int32_t)) dlsym(RTLD_NEXT, "llama_batch_ext_add_token");
    }
    if (tokens == LARGEST) {
        abort();
    }
    sequences[tokens++] = sequence;
    return real(batch, sequence, token);
}

int32_t llama_process(void * context, int type, void * batch) {
    static int32_t (*real)(void *, int, void *);
    if (!real) {
        real = (int32_t (*)(void *, int, void *)) dlsym(RTLD_NEXT, "llama_process");
    }
    int out = descriptor("FRAGMETER_STEPS_OUT");
    for (int first = 0, next; first < tokens; first = next) {
        for (next = first; next < tokens && sequences[next] == sequences[first]; next++) {
        }
        dprintf(out, "%s%d:%d", first ? " " : "", sequences[first], next - first);
    }
    dprintf(out, "\n");
    char go;
    if (read(descriptor("FRAGMETER_STEPS_IN"), &go, 1) != 1) {
        abort();
    }
    int32_t result = real(context, type, batch);
    dprintf(out, "= %d\n", result);
    return result;
}
