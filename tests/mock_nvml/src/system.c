/* Loading the library, initialization, and what concerns no single GPU. */
#include "mock.h"
#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>

static atomic_int initializations;

__attribute__((constructor)) static void load(void) {
    read_options();
    make_devices();
    open_counters();
    start_clock();
}

bool is_initialized(void) {
    return atomic_load(&initializations) > 0;
}

EXPORT int nvmlInit_v2(void) {
    static Call call;
    TRY(enter_before_init(&call, __func__));
    atomic_fetch_add(&initializations, 1);
    return OK;
}

EXPORT int nvmlInit(void) {
    return nvmlInit_v2();
}

EXPORT int nvmlInitWithFlags(UNUSED u32 flags) {
    return nvmlInit_v2();
}

EXPORT int nvmlShutdown(void) {
    SYSTEM_CALL();
    atomic_fetch_sub(&initializations, 1);
    return OK;
}

EXPORT int nvmlSystemGetDriverVersion(char *out, u32 size) {
    SYSTEM_CALL();
    return copy_text(out, size, options.driver);
}

EXPORT int nvmlSystemGetNVMLVersion(char *out, u32 size) {
    SYSTEM_CALL();
    char text[80];
    snprintf(text, sizeof text, "13.%s", options.driver);
    return copy_text(out, size, text);
}

EXPORT int nvmlSystemGetCudaDriverVersion(int *out) {
    SYSTEM_CALL();
    REQUIRE(out);
    *out = 13010;
    return OK;
}

EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *out) {
    SYSTEM_CALL();
    REQUIRE(out);
    *out = 13010;
    return OK;
}

EXPORT int nvmlSystemGetProcessName(u32 pid, char *out, u32 size) {
    SYSTEM_CALL();
    char link[64], target[1024];
    snprintf(link, sizeof link, "/proc/%u/exe", pid);
    ssize_t length = readlink(link, target, sizeof target - 1);
    if (length < 0)
        return NOT_FOUND;
    target[length] = '\0';
    return copy_text(out, size, target);
}

static int none(u32 *count) {
    REQUIRE(count);
    *count = 0;
    return OK;
}

EXPORT int nvmlUnitGetCount(u32 *out) {
    SYSTEM_CALL();
    return none(out);
}

EXPORT int nvmlGetExcludedDeviceCount(u32 *out) {
    SYSTEM_CALL();
    return none(out);
}

EXPORT int nvmlDeviceGetCount_v2(u32 *out) {
    SYSTEM_CALL();
    REQUIRE(out);
    *out = (u32)live_gpus();
    return OK;
}

EXPORT int nvmlDeviceGetCount(u32 *out) {
    return nvmlDeviceGetCount_v2(out);
}
