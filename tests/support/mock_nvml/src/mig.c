/* MIG: a GPU is divided as the control file says, else into MOCK_NVML_MIG instances of profile 1g.10gb. A handle
 * stands for a position among a GPU's instances, so after a division of another kind it is that of another one. */
#include "mock.h"
#include <stdlib.h>
#include <string.h>

enum { MIG_DEVICES_PER_GPU = 7 };

/* as nvidia-smi mig -lgip lists them for an H100 80GB; the ids are of no hardware */
static const MigProfile PROFILES[] = {
    {"1g.10gb", 1, 1, 1, 16, 1, 1, 1, 0, 7, 1},    {"1g.20gb", 1, 1, 2, 26, 1, 1, 1, 0, 15, 1},
    {"2g.20gb", 2, 2, 2, 32, 2, 2, 2, 0, 3, 1},    {"3g.40gb", 3, 3, 4, 60, 3, 3, 3, 0, 1, 1},
    {"1c.3g.40gb", 1, 3, 4, 16, 3, 3, 3, 0, 17, 3}, {"4g.40gb", 4, 4, 4, 64, 4, 4, 4, 0, 1, 1},
    {"7g.80gb", 7, 7, 8, 132, 8, 7, 7, 1, 0, 1},
};

static const MigProfile *profile_named(const char *name) {
    for (size_t i = 0; i < sizeof PROFILES / sizeof *PROFILES; i++)
        if (!strcmp(PROFILES[i].name, name))
            return &PROFILES[i];
    return NULL;
}

MigLayout even_layout(int instances) {
    MigLayout layout = {.enabled = instances > 0, .count = instances};
    for (int i = 0; i < MAX_MIG; i++) /* beyond the count too: a call may outlive the division it began in */
        layout.profile[i] = &PROFILES[0];
    return layout;
}

/* `off`, `none` (divided, without instances) or profiles with commas between. */
bool parse_layout(char *profiles, MigLayout *out) {
    char *save;
    *out = even_layout(0);
    out->enabled = strcmp(profiles, "off");
    if (!out->enabled || !strcmp(profiles, "none"))
        return true;
    for (char *word = strtok_r(profiles, ",", &save); word; word = strtok_r(NULL, ",", &save))
        if (out->count == MIG_DEVICES_PER_GPU || !(out->profile[out->count++] = profile_named(word)))
            return false;
    return true;
}

const MigLayout *layout_of(int gpu) {
    const MigLayout *declared = options.model->datacenter ? declared_layout(gpu) : NULL;
    return declared ? declared : &options.layout;
}

static int earlier_of_its_kind(const MigLayout *layout, int position) {
    int earlier = 0;
    for (int i = 0; i < position; i++)
        earlier += layout->profile[i] == layout->profile[position];
    return earlier;
}

int gpu_instance_of(const MigLayout *layout, int position) {
    const MigProfile *profile = layout->profile[position];
    return profile->first_id + earlier_of_its_kind(layout, position) / profile->per_gpu_instance;
}

int compute_instance_of(const MigLayout *layout, int position) {
    return earlier_of_its_kind(layout, position) % layout->profile[position]->per_gpu_instance;
}

static int instance(const Device *d) {
    return d->mig == WHOLE ? INVALID_ARGUMENT : OK;
}

GET_U32(nvmlDeviceIsMigDeviceHandle, any, d->mig != WHOLE)
GET_U32(nvmlDeviceGetMaxMigDeviceCount, datacenter, MIG_DEVICES_PER_GPU)
GET_U32(nvmlDeviceGetGpuInstanceId, instance, gpu_instance_of(layout_of(d->gpu), d->mig))
GET_U32(nvmlDeviceGetComputeInstanceId, instance, compute_instance_of(layout_of(d->gpu), d->mig))

EXPORT int nvmlDeviceGetMigMode(Device *d, u32 *current, u32 *pending) {
    DEVICE_CALL(d);
    TRY(datacenter(d));
    REQUIRE(current && pending);
    *current = *pending = layout_of(d->gpu)->enabled;
    return OK;
}

EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(Device *d, u32 index, Device **out) {
    DEVICE_CALL(d);
    TRY(datacenter(d));
    REQUIRE(out && index < MIG_DEVICES_PER_GPU);
    if (index >= (u32)layout_of(d->gpu)->count)
        return NOT_FOUND;
    *out = mig_device(d->gpu, (int)index);
    return OK;
}

EXPORT int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device *d, Device **out) {
    DEVICE_CALL(d);
    TRY(instance(d));
    REQUIRE(out);
    *out = whole_device(d->gpu);
    return OK;
}

typedef struct {
    u32 multiprocessors, copy_engines, decoders, encoders, jpeg, ofa, gpu_slices, compute_slices;
    u64 memory_mib;
} Attributes;

EXPORT int nvmlDeviceGetAttributes_v2(Device *d, Attributes *out) {
    DEVICE_CALL(d);
    TRY(instance(d));
    REQUIRE(out);
    const MigProfile *p = layout_of(d->gpu)->profile[d->mig];
    *out = (Attributes){.multiprocessors = p->multiprocessors,
                        .copy_engines = p->copy_engines,
                        .decoders = p->decoders,
                        .jpeg = p->jpeg,
                        .ofa = p->ofa,
                        .gpu_slices = p->gpu_slices,
                        .compute_slices = p->compute_slices,
                        .memory_mib = (options.model->memory >> 20) / 8 * p->memory_eighths};
    return OK;
}

EXPORT int nvmlDeviceGetAttributes(Device *d, Attributes *out) {
    return nvmlDeviceGetAttributes_v2(d, out);
}
