/* What a device is: names, versions, place in the machine. */
#include "mock.h"
#include <stdio.h>
#include <string.h>

EXPORT int nvmlDeviceGetName(Device *d, char *out, u32 size) {
    DEVICE_CALL(d);
    char text[96];
    if (d->mig == WHOLE)
        snprintf(text, sizeof text, "%s", options.model->name);
    else
        snprintf(text, sizeof text, "%s MIG %s", options.model->name, layout_of(d->gpu)->profile[d->mig]->name);
    return copy_text(out, size, text);
}

EXPORT int nvmlDeviceGetVbiosVersion(Device *d, char *out, u32 size) {
    DEVICE_CALL(d);
    return copy_text(out, size, "96.00.A5.00.01");
}

EXPORT int nvmlDeviceGetBoardPartNumber(Device *d, char *out, u32 size) {
    DEVICE_CALL(d);
    TRY(datacenter(d));
    return copy_text(out, size, "692-2G520-0200-000");
}

EXPORT int nvmlDeviceGetInforomImageVersion(Device *d, char *out, u32 size) {
    DEVICE_CALL(d);
    TRY(datacenter(d));
    return copy_text(out, size, "G520.0200.00.05");
}

EXPORT int nvmlDeviceGetInforomVersion(Device *d, u32 object, char *out, u32 size) {
    enum { ECC_OBJECT = 1 };
    DEVICE_CALL(d);
    TRY(datacenter(d));
    return copy_text(out, size, object == ECC_OBJECT ? "7.16" : "2.1");
}

EXPORT int nvmlDeviceGetGspFirmwareVersion(Device *d, char *out) {
    DEVICE_CALL(d);
    enum { GSP_FIRMWARE_VERSION_BUF_SIZE = 64 }; /* the function takes no size */
    return copy_text(out, GSP_FIRMWARE_VERSION_BUF_SIZE, driver_version());
}

EXPORT int nvmlDeviceGetGspFirmwareMode(Device *d, u32 *enabled, u32 *by_default) {
    DEVICE_CALL(d);
    REQUIRE(enabled && by_default);
    *enabled = *by_default = 1;
    return OK;
}

EXPORT int nvmlDeviceGetCudaComputeCapability(Device *d, int *major, int *minor) {
    DEVICE_CALL(d);
    REQUIRE(major && minor);
    *major = (int)options.model->compute_major;
    *minor = (int)options.model->compute_minor;
    return OK;
}

GET_U32(nvmlDeviceGetIndex, any, d->mig == WHOLE ? d->gpu : d->mig)
GET_U32(nvmlDeviceGetMinorNumber, any, d->gpu)
GET_U32(nvmlDeviceGetBrand, any, options.model->brand)
GET_U32(nvmlDeviceGetArchitecture, any, options.model->architecture)
GET_U32(nvmlDeviceGetBoardId, whole, 0x1000 + d->gpu * 0x100)
GET_U32(nvmlDeviceGetMultiGpuBoard, whole, 0)
GET_U32(nvmlDeviceGetModuleId, datacenter, d->gpu % 8 + 1)
GET_U32(nvmlDeviceGetBusType, whole, 2) /* PCIe */
GET_U32(nvmlDeviceGetIrqNum, whole, 100 + d->gpu)
GET_U32(nvmlDeviceGetNumGpuCores, whole, 16896)
GET_U32(nvmlDeviceGetMemoryBusWidth, has_memory, options.model->memory_bus_width)
GET_U32(nvmlDeviceGetPowerSource, whole, 0)
GET_U32(nvmlDeviceGetAdaptiveClockInfoStatus, whole, 1)

/* Two sockets, four GPUs on each. */
static int socket_of(const Device *d) {
    return d->gpu / 4 % 2;
}

static int fill_mask(u32 words, unsigned long *out, unsigned long first_word) {
    REQUIRE(out);
    memset(out, 0, words * sizeof *out);
    if (words)
        out[0] = first_word;
    return OK;
}

EXPORT int nvmlDeviceGetCpuAffinity(Device *d, u32 words, unsigned long *out) {
    DEVICE_CALL(d);
    return fill_mask(words, out, 0xfffful << 16 * socket_of(d));
}

EXPORT int nvmlDeviceGetMemoryAffinity(Device *d, u32 words, unsigned long *out, UNUSED u32 scope) {
    DEVICE_CALL(d);
    return fill_mask(words, out, 1ul << socket_of(d));
}
