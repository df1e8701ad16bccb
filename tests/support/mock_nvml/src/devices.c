/* The devices behind the handles, and what each kind of device refuses. */
#include "mock.h"
#include <stddef.h>

static Device gpus[MAX_GPUS], instances[MAX_GPUS][MAX_MIG];

void make_devices(void) {
    for (int gpu = 0; gpu < MAX_GPUS; gpu++) {
        gpus[gpu] = (Device){gpu, WHOLE};
        for (int mig = 0; mig < MAX_MIG; mig++)
            instances[gpu][mig] = (Device){gpu, mig};
    }
}

bool is_device(const void *handle) {
    uintptr_t at = (uintptr_t)handle;
    bool among_gpus = at >= (uintptr_t)gpus && at < (uintptr_t)(gpus + MAX_GPUS);
    bool among_instances = at >= (uintptr_t)instances && at < (uintptr_t)(instances + MAX_GPUS);
    return among_gpus || among_instances;
}

bool is_present(const Device *d) {
    return d->mig == WHOLE || d->mig < layout_of(d->gpu)->count;
}

Device *whole_device(int gpu) {
    return &gpus[gpu];
}

Device *mig_device(int gpu, int instance) {
    return &instances[gpu][instance];
}

static bool enumerated[MAX_GPUS];
static u64 session_began; /* the sequence number of the rule that was newest then */

void enumerate_gpus(void) {
    session_began = latest_xid();
    for (int gpu = 0; gpu < MAX_GPUS; gpu++) {
        u64 since;
        enumerated[gpu] = is_bound(gpu, &since);
    }
}

bool is_listed(int gpu) {
    u64 since;
    is_bound(gpu, &since);
    return enumerated[gpu] && since <= session_began;
}

Device *listed_gpu(int position) {
    int count = (int)setting(NO_GPU, "count", options.gpus);
    for (int gpu = 0; gpu < count && gpu < MAX_GPUS; gpu++)
        if (enumerated[gpu] && !position--)
            return &gpus[gpu];
    return NULL;
}

int live_gpus(void) {
    int count = 0;
    while (listed_gpu(count))
        count++;
    return count;
}

int any(UNUSED const Device *d) {
    return OK;
}

int whole(const Device *d) {
    return d->mig == WHOLE ? OK : NOT_SUPPORTED;
}

/* Utilization has no meaning for a GPU that is divided into MIG instances, nor for one of them. */
int undivided(const Device *d) {
    return d->mig == WHOLE && !layout_of(d->gpu)->enabled ? OK : NOT_SUPPORTED;
}

int datacenter(const Device *d) {
    return d->mig == WHOLE && options.model->datacenter ? OK : NOT_SUPPORTED;
}

int has_memory(UNUSED const Device *d) {
    return options.model->memory ? OK : NOT_SUPPORTED;
}

int has_power_limit(const Device *d) {
    return d->mig == WHOLE && options.model->limit_mw ? OK : NOT_SUPPORTED;
}

int has_fans(const Device *d) {
    return d->mig == WHOLE && options.model->fans ? OK : NOT_SUPPORTED;
}
