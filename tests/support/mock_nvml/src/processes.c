/* Processes that hold device memory, and samples of the busy ones. */
#include "mock.h"
#include <stddef.h>

typedef struct {
    u32 pid;
    u64 memory;
} ProcessV1;
typedef struct {
    u32 pid;
    u64 memory;
    u32 gpu_instance, compute_instance;
} ProcessV2; /* version 3 has the same layout */

/* With MIG a GPU's processes are dealt round-robin to its instances; the whole GPU shows all. */
static bool shown_on(const Device *d, int position) {
    const MigLayout *layout = layout_of(d->gpu);
    if (!layout->count)
        return !layout->enabled;
    return d->mig == WHOLE || position % layout->count == d->mig;
}

Processes processes_on(const Device *d, enum ProcessKind kind) {
    Processes all = processes_of(d->gpu, kind), out = {.count = 0};
    for (int i = 0; i < all.count; i++)
        if (shown_on(d, i))
            out.process[out.count++] = all.process[i];
    return out;
}

static ProcessV2 described(const Device *d, const Process *process, int position) {
    const MigLayout *layout = layout_of(d->gpu);
    if (!layout->count)
        return (ProcessV2){process->pid, process->memory, NO_INSTANCE, NO_INSTANCE};
    int at = position % layout->count;
    bool hidden = d->mig == WHOLE && setting(d->gpu, "mig_hides", 0);
    return (ProcessV2){process->pid, hidden ? VALUE_NOT_AVAILABLE : process->memory,
                       (u32)gpu_instance_of(layout, at), (u32)compute_instance_of(layout, at)};
}

/* The caller's buffer is of version 1 or 2; too small a one learns how many there are. */
static int list(const Device *d, enum ProcessKind kind, u32 *count, ProcessV1 *v1, ProcessV2 *v2) {
    REQUIRE(count);
    Processes all = processes_of(d->gpu, kind);
    u32 room = v1 || v2 ? *count : 0;
    *count = 0;
    for (int i = 0; i < all.count; i++) {
        if (!shown_on(d, i))
            continue;
        if (*count < room && v1)
            v1[*count] = (ProcessV1){all.process[i].pid, all.process[i].memory};
        else if (*count < room)
            v2[*count] = described(d, &all.process[i], i);
        ++*count;
    }
    return *count > room ? INSUFFICIENT_SIZE : OK;
}

#define PROCESS_LIST(name, kind)                                                                             \
    EXPORT int name(Device *d, u32 *count, ProcessV1 *out) {                                                 \
        DEVICE_CALL(d);                                                                                      \
        return list(d, kind, count, out, NULL);                                                              \
    }                                                                                                        \
    EXPORT int name##_v2(Device *d, u32 *count, ProcessV2 *out) {                                            \
        DEVICE_CALL(d);                                                                                      \
        return list(d, kind, count, NULL, out);                                                              \
    }                                                                                                        \
    EXPORT int name##_v3(Device *d, u32 *count, ProcessV2 *out) {                                            \
        DEVICE_CALL(d);                                                                                      \
        return list(d, kind, count, NULL, out);                                                              \
    }
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses, COMPUTE)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses, GRAPHICS)

#define NO_PROCESSES(name)                                                                                   \
    EXPORT int name(Device *d, u32 *count, UNUSED void *out) {                                               \
        DEVICE_CALL(d);                                                                                      \
        REQUIRE(count);                                                                                      \
        *count = 0;                                                                                          \
        return OK;                                                                                           \
    }
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3)

typedef struct {
    u32 pid;
    u64 memory;
    u32 gpu_instance, compute_instance;
    u64 protected_memory;
} ProcessDetail;
typedef struct {
    u32 version, mode, count;
    ProcessDetail *array;
} ProcessDetailList;

EXPORT int nvmlDeviceGetRunningProcessDetailList(Device *d, ProcessDetailList *out) {
    enum { COMPUTE_MODE, GRAPHICS_MODE };
    DEVICE_CALL(d);
    REQUIRE(out);
    Processes found = {.count = 0};
    if (out->mode <= GRAPHICS_MODE)
        found = processes_of(d->gpu, out->mode == COMPUTE_MODE ? COMPUTE : GRAPHICS);
    u32 room = out->array ? out->count : 0;
    out->count = (u32)found.count;
    if (out->count > room)
        return INSUFFICIENT_SIZE;
    for (int i = 0; i < found.count; i++)
        out->array[i] =
            (ProcessDetail){found.process[i].pid, found.process[i].memory, NO_INSTANCE, NO_INSTANCE, 0};
    return OK;
}

/* An H100 with driver 590.48.01 gives samples of busy processes alone: here of all but the last of several.
 */
static u32 busy_processes(const Processes *all) {
    return (u32)(all->count > 1 ? all->count - 1 : all->count);
}

enum { SAMPLE_AGE_US = 200000 };
typedef struct {
    u32 pid;
    u64 timestamp;
    u32 sm, memory, encoder, decoder;
} UtilizationSample;
_Static_assert(sizeof(UtilizationSample) == 32, "nvmlProcessUtilizationSample_t");

EXPORT int nvmlDeviceGetProcessUtilization(Device *d, UtilizationSample *out, u32 *count, UNUSED u64 since) {
    enum { RING_SIZE = 100 }; /* what the size query answers: the ring, not its valid samples (unverified) */
    DEVICE_CALL(d);
    TRY(undivided(d));
    REQUIRE(count);
    Processes all = processes_of(d->gpu, COMPUTE);
    u32 busy = busy_processes(&all), room = *count;
    *count = out || !busy ? busy : RING_SIZE;
    if (!busy)
        return NOT_FOUND;
    if (!out || room < busy)
        return INSUFFICIENT_SIZE;
    double percent = utilization(d->gpu) / busy;
    for (u32 i = 0; i < busy; i++)
        out[i] = (UtilizationSample){.pid = all.process[i].pid,
                                     .timestamp = wall_clock_us() - SAMPLE_AGE_US,
                                     .sm = (u32)percent,
                                     .memory = (u32)(percent * 0.6)};
    return OK;
}

typedef struct {
    u64 timestamp;
    u32 pid, sm, memory, encoder, decoder, jpeg, ofa;
} UtilizationInfo;
typedef struct {
    u32 version, count;
    u64 since;
    UtilizationInfo *array;
} UtilizationInfoList;

EXPORT int nvmlDeviceGetProcessesUtilizationInfo(Device *d, UtilizationInfoList *out) {
    DEVICE_CALL(d);
    TRY(undivided(d));
    REQUIRE(out);
    Processes all = processes_of(d->gpu, COMPUTE);
    u32 busy = busy_processes(&all), room = out->array ? out->count : 0;
    out->count = busy;
    if (!busy)
        return NOT_FOUND;
    if (room < busy)
        return INSUFFICIENT_SIZE;
    double percent = utilization(d->gpu) / busy;
    for (u32 i = 0; i < busy; i++)
        out->array[i] = (UtilizationInfo){.timestamp = wall_clock_us() - SAMPLE_AGE_US,
                                          .pid = all.process[i].pid,
                                          .sm = (u32)percent,
                                          .memory = (u32)(percent * 0.6)};
    return OK;
}
