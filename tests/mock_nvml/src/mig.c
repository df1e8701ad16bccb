/* MIG: every GPU is divided into MOCK_NVML_MIG instances of profile 1g.10gb. */
#include "mock.h"

enum { MIG_DEVICES_PER_GPU = 7 };

static int instance(const Device *d) {
    return d->mig == WHOLE ? INVALID_ARGUMENT : OK;
}

GET_U32(nvmlDeviceIsMigDeviceHandle, any, d->mig != WHOLE)
GET_U32(nvmlDeviceGetMaxMigDeviceCount, datacenter, MIG_DEVICES_PER_GPU)
GET_U32(nvmlDeviceGetGpuInstanceId, instance, d->mig + 7)
GET_U32(nvmlDeviceGetComputeInstanceId, instance, 0)

EXPORT int nvmlDeviceGetMigMode(Device *d, u32 *current, u32 *pending) {
    DEVICE_CALL(d);
    TRY(datacenter(d));
    REQUIRE(current && pending);
    *current = *pending = options.mig > 0;
    return OK;
}

EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(Device *d, u32 index, Device **out) {
    DEVICE_CALL(d);
    TRY(datacenter(d));
    REQUIRE(out && index < MIG_DEVICES_PER_GPU);
    if (index >= (u32)options.mig)
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
    *out = (Attributes){16, 1, 1, 0, 1, 0, 1, 1, 9856};
    return OK;
}

EXPORT int nvmlDeviceGetAttributes(Device *d, Attributes *out) {
    return nvmlDeviceGetAttributes_v2(d, out);
}
