/* Loading the library, initialization, and what concerns no single GPU. */
#include "mock.h"
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>

static atomic_int initializations;

/* Files that stand for the driver's devices, open from the first use to the last shutdown; the last is nvidiactl. */
static int devices[MAX_GPUS + 1];
static pthread_mutex_t holding = PTHREAD_MUTEX_INITIALIZER;

void hold_device(int gpu) {
    if (!options.devices)
        return;
    char path[4096];
    if (gpu == NO_GPU)
        snprintf(path, sizeof path, "%s/nvidiactl", options.devices);
    else
        snprintf(path, sizeof path, "%s/nvidia%d", options.devices, gpu);
    int *held = &devices[gpu == NO_GPU ? MAX_GPUS : gpu];
    pthread_mutex_lock(&holding);
    if (!*held && (*held = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644)) < 0)
        refuse("MOCK_NVML_DEVICES", path);
    pthread_mutex_unlock(&holding);
}

static void release_devices(void) {
    pthread_mutex_lock(&holding);
    for (int i = 0; i <= MAX_GPUS; i++)
        if (devices[i]) {
            close(devices[i]);
            devices[i] = 0;
        }
    pthread_mutex_unlock(&holding);
}

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
    if (!atomic_fetch_add(&initializations, 1))
        enumerate_gpus();
    hold_device(NO_GPU);
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
    if (atomic_fetch_sub(&initializations, 1) == 1)
        release_devices();
    return OK;
}

EXPORT int nvmlSystemGetDriverVersion(char *out, u32 size) {
    SYSTEM_CALL();
    return copy_text(out, size, driver_version());
}

EXPORT int nvmlSystemGetNVMLVersion(char *out, u32 size) {
    SYSTEM_CALL();
    char text[80];
    snprintf(text, sizeof text, "13.%s", driver_version());
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
