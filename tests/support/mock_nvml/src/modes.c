/* Modes and accounting. */
#include "mock.h"

static int deprecated(UNUSED const Device *d) {
    return DEPRECATED; /* what driver 590.48.01 answers */
}

GET_U32(nvmlDeviceGetPersistenceMode, whole, 1)
GET_U32(nvmlDeviceGetComputeMode, any, 0)
GET_U32(nvmlDeviceGetDisplayMode, deprecated, 0)
GET_U32(nvmlDeviceGetDisplayActive, whole, 0)
GET_U32(nvmlDeviceGetVirtualizationMode, whole, 0)
GET_U32(nvmlDeviceGetAccountingMode, whole, 0)
GET_U32(nvmlDeviceGetAccountingBufferSize, whole, 4000)

EXPORT int nvmlDeviceGetGpuOperationMode(Device *d, UNUSED u32 *current, UNUSED u32 *pending) {
    DEVICE_CALL(d);
    return NOT_SUPPORTED;
}

EXPORT int nvmlDeviceGetAccountingPids(Device *d, u32 *count, UNUSED u32 *pids) {
    DEVICE_CALL(d);
    REQUIRE(count);
    *count = 0;
    return OK;
}

EXPORT int nvmlDeviceGetAccountingStats(Device *d, UNUSED u32 pid, UNUSED void *out) {
    DEVICE_CALL(d);
    return NOT_FOUND;
}
