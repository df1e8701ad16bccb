/* Device memory, BAR1, and how busy the units are. */
#include "mock.h"
#include <stddef.h>

typedef struct {
    u64 total, free, used;
} Memory;
typedef struct {
    u32 version;
    u64 total, reserved, free, used;
} MemoryV2;
_Static_assert(sizeof(MemoryV2) == 40, "nvmlMemory_v2_t");

/* An instance has as many eighths of the device as its profile says. */
static u64 share(const Device *d, u64 bytes) {
    return d->mig == WHOLE ? bytes : bytes / 8 * layout_of(d->gpu)->profile[d->mig]->memory_eighths;
}

static u64 used_on(const Device *d) {
    if (d->mig == WHOLE)
        return memory_used(d->gpu);
    Processes compute = processes_on(d, COMPUTE);
    u64 used = (4ULL << 20) + memory_of(&compute), most = share(d, options.model->memory - memory_reserved());
    return used > most ? most : used;
}

EXPORT int nvmlDeviceGetMemoryInfo(Device *d, Memory *out) {
    DEVICE_CALL(d);
    TRY(has_memory(d));
    REQUIRE(out);
    u64 total = share(d, memory_total(d->gpu));
    u64 used = used_on(d) + share(d, memory_reserved()); /* version 1 counts reserved as used */
    *out = total ? (Memory){total, total - used, used} : (Memory){0, 0, 0};
    return OK;
}

EXPORT int nvmlDeviceGetMemoryInfo_v2(Device *d, MemoryV2 *out) {
    DEVICE_CALL(d);
    TRY(has_memory(d));
    REQUIRE(out);
    if (out->version != (2u << 24 | sizeof *out))
        return ARGUMENT_VERSION_MISMATCH;
    u64 total = share(d, memory_total(d->gpu)), used = used_on(d);
    u64 reserved = share(d, memory_reserved());
    *out = total ? (MemoryV2){out->version, total, reserved, total - used - reserved, used}
                 : (MemoryV2){out->version, 0, 0, 0, 0};
    return OK;
}

typedef struct {
    const char *cgroup;
    u64 soft, hard, used;
} CgroupMemoryLimits;
_Static_assert(sizeof(CgroupMemoryLimits) == 32, "nvmlGetMemoryLimits_v1_t");

/* Drivers before R615 lack it, and so does the mock until a rule gives a cgroup limits. */
EXPORT int nvmlDeviceGetMemoryLimits_v1(Device *d, CgroupMemoryLimits *out) {
    DEVICE_CALL(d);
    TRY(has_memory(d));
    TRY(undivided(d));
    REQUIRE(out && out->cgroup);
    if (!memory_limits_of(d->gpu, NULL))
        return NOT_SUPPORTED;
    const MemoryLimits *limits = memory_limits_of(d->gpu, out->cgroup);
    *out = limits ? (CgroupMemoryLimits){out->cgroup, limits->soft, limits->hard, limits->used}
                  : (CgroupMemoryLimits){out->cgroup, 0, ~0ULL, 0};
    return OK;
}

EXPORT int nvmlDeviceGetBAR1MemoryInfo(Device *d, Memory *out) {
    DEVICE_CALL(d);
    TRY(has_memory(d));
    REQUIRE(out);
    u64 used = 2ULL << 20;
    *out = (Memory){options.model->bar1, options.model->bar1 - used, used};
    return OK;
}

typedef struct {
    u32 gpu, memory;
} Utilization;

EXPORT int nvmlDeviceGetUtilizationRates(Device *d, Utilization *out) {
    DEVICE_CALL(d);
    TRY(undivided(d));
    REQUIRE(out);
    double busy = utilization(d->gpu);
    *out = (Utilization){(u32)busy, has_memory(d) == OK ? (u32)(busy * 0.6) : 0};
    return OK;
}

static int unit_utilization(const Device *d, double percent, u32 *out, u32 *period_us) {
    TRY(undivided(d));
    REQUIRE(out && period_us);
    *out = (u32)percent;
    *period_us = 167000;
    return OK;
}

EXPORT int nvmlDeviceGetEncoderUtilization(Device *d, u32 *out, u32 *period_us) {
    DEVICE_CALL(d);
    return unit_utilization(d, options.model->datacenter ? 0 : 20 * wave(d->gpu, 30, 0.2), out, period_us);
}

EXPORT int nvmlDeviceGetDecoderUtilization(Device *d, u32 *out, u32 *period_us) {
    DEVICE_CALL(d);
    return unit_utilization(d, options.model->datacenter ? 0 : 15 * wave(d->gpu, 40, 0.1), out, period_us);
}

EXPORT int nvmlDeviceGetJpgUtilization(Device *d, u32 *out, u32 *period_us) {
    DEVICE_CALL(d);
    TRY(datacenter(d));
    return unit_utilization(d, 0, out, period_us);
}

EXPORT int nvmlDeviceGetOfaUtilization(Device *d, u32 *out, u32 *period_us) {
    DEVICE_CALL(d);
    TRY(datacenter(d));
    return unit_utilization(d, 0, out, period_us);
}

EXPORT int nvmlDeviceGetEncoderStats(Device *d, u32 *sessions, u32 *average_fps, u32 *average_latency) {
    DEVICE_CALL(d);
    REQUIRE(sessions && average_fps && average_latency);
    *sessions = *average_fps = *average_latency = 0;
    return OK;
}

EXPORT int nvmlDeviceGetEncoderSessions(Device *d, u32 *count, UNUSED void *sessions) {
    DEVICE_CALL(d);
    REQUIRE(count);
    *count = 0;
    return OK;
}

EXPORT int nvmlDeviceGetEncoderCapacity(Device *d, UNUSED u32 codec, u32 *out) {
    DEVICE_CALL(d);
    REQUIRE(out);
    if (options.model->datacenter)
        return NOT_SUPPORTED;
    *out = 100;
    return OK;
}

typedef struct {
    u32 sessions, average_fps, average_latency;
} FrameBufferCapture;

EXPORT int nvmlDeviceGetFBCStats(Device *d, FrameBufferCapture *out) {
    DEVICE_CALL(d);
    REQUIRE(out);
    *out = (FrameBufferCapture){0};
    return OK;
}
