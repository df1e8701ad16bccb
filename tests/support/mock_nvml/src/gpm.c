/* GPM: performance metrics between two samples. A sample that two threads use at once has panicked kernels: here it
 * ends the process, as do a sample that was never allocated and one that is given back twice. */
#include "mock.h"
#include <stdatomic.h>
#include <stdlib.h>

typedef struct {
    u32 version, supported;
} GpmSupport;
enum { LIVE_SAMPLE = 0x6770 };
typedef struct {
    u32 mark;
    atomic_bool used;
    const Device *device;
    int position; /* of the MIG instance, or WHOLE */
    double taken_at;
} GpmSample;
typedef struct {
    u32 id, result;
    double value;
    struct {
        const char *short_name, *long_name, *unit;
    } info;
} GpmMetric;
typedef struct {
    u32 version, count;
    GpmSample *first, *second;
    GpmMetric metrics[];
} GpmRequest;

static void hold(GpmSample *sample, const char *function) {
    if (sample->mark != LIVE_SAMPLE)
        refuse("no GPM sample, or one that was freed", function);
    if (atomic_exchange(&sample->used, true))
        refuse("a GPM sample used by two threads at once", function);
}

static void release_sample(GpmSample *sample) {
    atomic_store(&sample->used, false);
}

EXPORT int nvmlGpmQueryDeviceSupport(Device *d, GpmSupport *out) {
    DEVICE_CALL(d);
    REQUIRE(out);
    out->supported = options.model->datacenter;
    return OK;
}

EXPORT int nvmlGpmSampleAlloc(GpmSample **out) {
    SYSTEM_CALL();
    REQUIRE(out);
    *out = calloc(1, sizeof **out);
    (*out)->mark = LIVE_SAMPLE;
    return OK;
}

static int free_sample(const char *function, GpmSample *sample) {
    static Call call;
    TRY(enter_system(&call, function));
    sample->mark = 0;
    return OK;
}

EXPORT int nvmlGpmSampleFree(GpmSample *sample) {
    REQUIRE(sample);
    hold(sample, __func__);
    int result = free_sample(__func__, sample);
    release_sample(sample); /* never freed, so that use after free can be detected */
    return result;
}

/* Of a divided GPU there are samples by instance alone: an assumption, NVIDIA does not say. */
static int sample_whole(const char *function, Device *d, GpmSample *out) {
    static Call call;
    TRY(enter_device(&call, function, d));
    TRY(datacenter(d));
    TRY(undivided(d));
    out->position = WHOLE;
    return OK;
}

static int sample_instance(const char *function, Device *d, u32 gpu_instance, GpmSample *out) {
    static Call call;
    TRY(enter_device(&call, function, d));
    TRY(datacenter(d));
    const MigLayout *layout = layout_of(d->gpu);
    for (int i = 0; i < layout->count; i++)
        if ((u32)gpu_instance_of(layout, i) == gpu_instance) {
            out->position = i;
            return OK;
        }
    return INVALID_ARGUMENT;
}

static int sampled(int result, const Device *d, GpmSample *out) {
    if (result == OK) {
        out->device = d;
        out->taken_at = seconds();
    }
    release_sample(out);
    return result;
}

EXPORT int nvmlGpmSampleGet(Device *d, GpmSample *out) {
    REQUIRE(out);
    hold(out, __func__);
    return sampled(sample_whole(__func__, d, out), d, out);
}

EXPORT int nvmlGpmMigSampleGet(Device *d, u32 gpu_instance, GpmSample *out) {
    REQUIRE(out);
    hold(out, __func__);
    return sampled(sample_instance(__func__, d, gpu_instance, out), d, out);
}

/* Percentages follow the utilization, the tensor and float pipes at two fifths of it; the links carry MiB/s. */
static double metric(u32 id, double busy) {
    enum { SM_UTILIZATION = 2, LAST_PIPE = 13, PCIE_TX = 20, PCIE_RX = 21, NVLINK_RX = 60, NVLINK_TX = 61 };
    enum { FIRST_OF_A_LINK = 62, LAST_OF_A_LINK = 97 };
    if (id <= SM_UTILIZATION)
        return busy;
    if (id <= LAST_PIPE)
        return busy * 0.4;
    if (id == PCIE_TX || id == PCIE_RX)
        return 400 + 4 * busy;
    if (id == NVLINK_RX || id == NVLINK_TX)
        return 9000 + 90 * busy;
    return id >= FIRST_OF_A_LINK && id <= LAST_OF_A_LINK ? 500 + 5 * busy : 0;
}

/* Each MIG instance is a tenth less busy than the one before. */
static double busy_percent(const GpmSample *sample) {
    double whole = utilization(sample->device->gpu);
    return sample->position == WHOLE ? whole : whole * (1 - 0.1 * sample->position);
}

static int answer(const char *function, GpmRequest *request) {
    enum { LAST_METRIC = 333 };
    static Call call;
    TRY(enter_system(&call, function));
    REQUIRE(request->first->device && request->second->device);
    REQUIRE(request->second->taken_at > request->first->taken_at);
    REQUIRE(request->second->position == request->first->position);
    double busy = busy_percent(request->second);
    for (u32 i = 0; i < request->count; i++) {
        GpmMetric *wanted = &request->metrics[i];
        wanted->result = wanted->id == 0 || wanted->id > LAST_METRIC ? INVALID_ARGUMENT : OK;
        wanted->value = metric(wanted->id, busy);
        wanted->info.short_name = wanted->info.long_name = wanted->info.unit = "";
    }
    return OK;
}

EXPORT int nvmlGpmMetricsGet(GpmRequest *request) {
    REQUIRE(request && request->first && request->second && request->first != request->second);
    hold(request->first, __func__);
    hold(request->second, __func__);
    int result = answer(__func__, request);
    release_sample(request->second);
    release_sample(request->first);
    return result;
}
