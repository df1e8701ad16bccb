/* Looking a GPU up, and the names it is looked up by. A look-up that finds a GPU meets that GPU's faults: a
 * lost one cannot be opened again. */
#include "mock.h"
#include <stdio.h>
#include <string.h>
#include <strings.h>

enum { TEXT_SIZE = 96, BUSES_PER_DOMAIN = 64, FIRST_BUS = 0x10 };

static int domain_of(const Device *d) {
    return d->gpu / BUSES_PER_DOMAIN;
}

static int bus_of(const Device *d) {
    return FIRST_BUS + d->gpu % BUSES_PER_DOMAIN;
}

static void uuid(const Device *d, char *out) {
    if (d->mig == WHOLE)
        snprintf(out, TEXT_SIZE, "GPU-%08x-4d4f-434b-8000-%012x", 0xa0b1c2d0u + d->gpu, d->gpu);
    else {
        const MigLayout *layout = layout_of(d->gpu);
        int ids = gpu_instance_of(layout, d->mig) * 16 + compute_instance_of(layout, d->mig);
        snprintf(out, TEXT_SIZE, "MIG-%08x-4d4f-%04x-9000-%012x", 0xa0b1c2d0u + d->gpu,
                 0x534b + layout->generation, ids);
    }
}

static void bus_id(const Device *d, char *out) {
    snprintf(out, 32, "%08X:%02X:00.0", domain_of(d), bus_of(d));
}

/* As the driver's own ids of GPUs (open-gpu-kernel-modules, gpuGenerate32BitId), with device 0. */
u32 id_of_gpu(int gpu) {
    const Device *d = whole_device(gpu);
    return (u32)domain_of(d) << 16 | (u32)bus_of(d) << 8;
}

static void serial(const Device *d, char *out) {
    snprintf(out, TEXT_SIZE, "16521230%05d", d->gpu);
}

/* `found` may be NULL: then the call meets the faults of the system, and answers `otherwise`. */
static int open_device(Call *call, const char *function, Device *found, int otherwise, Device **out) {
    TRY(enter_gpu(call, function, found ? found->gpu : NO_GPU));
    if (!found)
        return otherwise;
    REQUIRE(out);
    hold_device(found->gpu);
    *out = found;
    return OK;
}

static Device *search(void (*name)(const Device *, char *), const char *wanted, size_t skip) {
    char text[TEXT_SIZE];
    Device *found;
    for (int i = 0; wanted && (found = listed_gpu(i)); i++) {
        name(found, text);
        if (!strcasecmp(text, wanted) || (skip && !strcasecmp(text + skip, wanted)))
            return found;
    }
    return NULL;
}

Device *device_of_uuid(const char *text) {
    return search(uuid, text, 0);
}

void write_uuid(const Device *d, char out[96]) {
    uuid(d, out);
}

static Device *search_instances(const char *wanted) {
    char text[TEXT_SIZE];
    Device *found;
    for (int i = 0; wanted && (found = listed_gpu(i)); i++)
        for (int mig = 0; mig < layout_of(found->gpu)->count; mig++) {
            uuid(mig_device(found->gpu, mig), text);
            if (!strcasecmp(text, wanted))
                return mig_device(found->gpu, mig);
        }
    return NULL;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(u32 index, Device **out) {
    static Call call;
    follow_control(); /* the count may just have changed */
    return open_device(&call, __func__, listed_gpu((int)index), INVALID_ARGUMENT, out);
}

EXPORT int nvmlDeviceGetHandleByIndex(u32 index, Device **out) {
    return nvmlDeviceGetHandleByIndex_v2(index, out);
}

EXPORT int nvmlDeviceGetHandleByUUID(const char *text, Device **out) {
    static Call call;
    follow_control();
    Device *found = search(uuid, text, 0);
    return open_device(&call, __func__, found ? found : search_instances(text), NOT_FOUND, out);
}

EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *text, Device **out) {
    static Call call;
    const size_t shorter_domain = 4; /* the legacy form has a domain of four digits, not eight */
    follow_control();
    return open_device(&call, __func__, search(bus_id, text, shorter_domain), NOT_FOUND, out);
}

EXPORT int nvmlDeviceGetHandleByPciBusId(const char *text, Device **out) {
    return nvmlDeviceGetHandleByPciBusId_v2(text, out);
}

EXPORT int nvmlDeviceGetHandleBySerial(const char *text, Device **out) {
    static Call call;
    follow_control();
    Device *found = options.model->datacenter ? search(serial, text, 0) : NULL;
    return open_device(&call, __func__, found, NOT_FOUND, out);
}

EXPORT int nvmlDeviceGetUUID(Device *d, char *out, u32 size) {
    DEVICE_CALL(d);
    char text[TEXT_SIZE];
    uuid(d, text);
    return copy_text(out, size, text);
}

EXPORT int nvmlDeviceGetSerial(Device *d, char *out, u32 size) {
    DEVICE_CALL(d);
    TRY(datacenter(d));
    char text[TEXT_SIZE];
    serial(d, text);
    return copy_text(out, size, text);
}

static void fill_pci(const Device *d, PciInfo *out) {
    *out = (PciInfo){.domain = domain_of(d), .bus = bus_of(d), .device_id = options.model->pci_id};
    out->subsystem_id = 0x16C110DE;
    bus_id(d, out->bus_id);
    memcpy(out->bus_id_legacy, out->bus_id + 4, 13);
}

EXPORT int nvmlDeviceGetPciInfo_v3(Device *d, PciInfo *out) {
    DEVICE_CALL(d);
    TRY(whole(d));
    REQUIRE(out);
    fill_pci(d, out);
    return OK;
}

EXPORT int nvmlDeviceGetPciInfo_v2(Device *d, PciInfo *out) {
    return nvmlDeviceGetPciInfo_v3(d, out);
}

EXPORT int nvmlDeviceGetPciInfo(Device *d, PciInfo *out) {
    return nvmlDeviceGetPciInfo_v3(d, out);
}

typedef struct {
    u32 version, domain, bus, device, device_id, subsystem_id, base_class, sub_class;
    char bus_id[32];
} PciInfoExt;

EXPORT int nvmlDeviceGetPciInfoExt(Device *d, PciInfoExt *out) {
    DEVICE_CALL(d);
    TRY(whole(d));
    REQUIRE(out);
    PciInfo pci;
    fill_pci(d, &pci);
    *out = (PciInfoExt){
        .version = out->version, .domain = pci.domain, .bus = pci.bus, .device_id = pci.device_id};
    out->subsystem_id = pci.subsystem_id;
    out->base_class = 3; /* display controller, */
    out->sub_class = 2;  /* 3D */
    memcpy(out->bus_id, pci.bus_id, sizeof out->bus_id);
    return OK;
}
