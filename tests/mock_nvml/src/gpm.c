/* GPM: performance metrics between two samples. */
#include "mock.h"
#include <stdlib.h>

typedef struct {
    u32 version, supported;
} GpmSupport;
typedef struct {
    const Device *device;
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
    const GpmSample *first, *second;
    GpmMetric metrics[];
} GpmRequest;

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
    return OK;
}

EXPORT int nvmlGpmSampleFree(GpmSample *sample) {
    SYSTEM_CALL();
    free(sample);
    return OK;
}

static int take_sample(const Device *d, GpmSample *out) {
    if (!options.model->datacenter)
        return NOT_SUPPORTED;
    REQUIRE(out);
    *out = (GpmSample){d, seconds()};
    return OK;
}

EXPORT int nvmlGpmSampleGet(Device *d, GpmSample *out) {
    DEVICE_CALL(d);
    TRY(datacenter(d));
    return take_sample(d, out);
}

EXPORT int nvmlGpmMigSampleGet(Device *d, UNUSED u32 gpu_instance, GpmSample *out) {
    DEVICE_CALL(d);
    return take_sample(d, out);
}

/* Percentages follow the utilization, the tensor and float pipes at two fifths of it; the links carry MiB/s.
 */
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

EXPORT int nvmlGpmMetricsGet(GpmRequest *request) {
    enum { LAST_METRIC = 333 };
    SYSTEM_CALL();
    REQUIRE(request && request->first && request->second && request->first->device);
    REQUIRE(request->second->taken_at > request->first->taken_at);
    double busy = utilization(request->second->device->gpu);
    for (u32 i = 0; i < request->count; i++) {
        GpmMetric *wanted = &request->metrics[i];
        wanted->result = wanted->id == 0 || wanted->id > LAST_METRIC ? INVALID_ARGUMENT : OK;
        wanted->value = metric(wanted->id, busy);
        wanted->info.short_name = wanted->info.long_name = wanted->info.unit = "";
    }
    return OK;
}
