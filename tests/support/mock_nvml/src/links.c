/* PCIe, NVLink and the topology. */
#include "mock.h"
#include <stdio.h>
#include <string.h>

GET_U32(nvmlDeviceGetMaxPcieLinkGeneration, whole, options.model->pcie_generation)
GET_U32(nvmlDeviceGetGpuMaxPcieLinkGeneration, whole, options.model->pcie_generation)
GET_U32(nvmlDeviceGetMaxPcieLinkWidth, whole, options.model->pcie_width)
GET_U32(nvmlDeviceGetCurrPcieLinkGeneration, whole,
        setting(d->gpu, "pcie_gen", options.model->pcie_generation))
GET_U32(nvmlDeviceGetCurrPcieLinkWidth, whole, setting(d->gpu, "pcie_width", options.model->pcie_width))
GET_U32(nvmlDeviceGetPcieReplayCounter, whole, setting(d->gpu, "pcie_replay", 0))
GET_U32(nvmlDeviceGetPcieSpeed, whole, options.model->pcie_speed_mbps)
GET_U32(nvmlDeviceGetPcieLinkMaxSpeed, whole, options.model->pcie_max_speed_code)

EXPORT int nvmlDeviceGetPcieThroughput(Device *d, u32 counter, u32 *out) {
    enum { TRANSMITTED, RECEIVED };
    DEVICE_CALL(d);
    TRY(whole(d));
    REQUIRE(out && counter <= RECEIVED);
    double most_kb_per_second = counter == RECEIVED ? 900000 : 450000;
    *out = (u32)(most_kb_per_second * wave(d->gpu, 20, counter * 0.25));
    return OK;
}

static int has_link(const Device *d, u32 link) {
    TRY(whole(d));
    if (!options.model->nvlinks)
        return NOT_SUPPORTED;
    return link < options.model->nvlinks ? OK : INVALID_ARGUMENT;
}

static int answer_link(const Device *d, u32 link, u32 value, u32 *out) {
    TRY(has_link(d, link));
    REQUIRE(out);
    *out = value;
    return OK;
}

EXPORT int nvmlDeviceGetNvLinkState(Device *d, u32 link, u32 *out) {
    DEVICE_CALL(d);
    return answer_link(d, link, setting(d->gpu, "nvlink_down", -1) != link, out);
}

EXPORT int nvmlDeviceGetNvLinkVersion(Device *d, u32 link, u32 *out) {
    DEVICE_CALL(d);
    return answer_link(d, link, 7, out);
}

EXPORT int nvmlDeviceGetNvLinkCapability(Device *d, u32 link, UNUSED u32 capability, u32 *out) {
    DEVICE_CALL(d);
    return answer_link(d, link, 1, out);
}

EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(Device *d, u32 link, u32 *out) {
    enum { SWITCH = 2 };
    DEVICE_CALL(d);
    return answer_link(d, link, SWITCH, out);
}

EXPORT int nvmlDeviceGetNvLinkErrorCounter(Device *d, u32 link, UNUSED u32 counter, u64 *out) {
    DEVICE_CALL(d);
    TRY(has_link(d, link));
    REQUIRE(out);
    *out = (u64)setting(d->gpu, "nvlink_errors", 0);
    return OK;
}

/* Four NVSwitches share the links. */
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(Device *d, u32 link, PciInfo *out) {
    DEVICE_CALL(d);
    TRY(has_link(d, link));
    REQUIRE(out);
    *out = (PciInfo){.bus = 5 + link % 4};
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", out->bus);
    memcpy(out->bus_id_legacy, out->bus_id + 4, 13);
    return OK;
}

EXPORT int nvmlDeviceGetNvLinkRemotePciInfo(Device *d, u32 link, PciInfo *out) {
    return nvmlDeviceGetNvLinkRemotePciInfo_v2(d, link, out);
}

EXPORT int nvmlDeviceGetTopologyCommonAncestor(Device *d, Device *other, u32 *out) {
    enum { NODE = 40, SYSTEM = 50, GPUS_PER_SOCKET = 4 };
    DEVICE_CALL(d);
    REQUIRE(is_device(other) && out);
    *out = d->gpu / GPUS_PER_SOCKET == other->gpu / GPUS_PER_SOCKET ? NODE : SYSTEM;
    return OK;
}

EXPORT int nvmlDeviceGetP2PStatus(Device *d, Device *other, UNUSED u32 capability, u32 *out) {
    DEVICE_CALL(d);
    REQUIRE(is_device(other) && out);
    *out = 0;
    return OK;
}

enum { FABRIC_STATE_COMPLETED = 3 };
typedef struct {
    unsigned char cluster_uuid[16];
    u32 status, clique, state;
} FabricInfo;
typedef struct {
    u32 version;
    unsigned char cluster_uuid[16];
    u32 status, clique, state, health_mask;
    unsigned char health_summary;
} FabricInfoV3;

EXPORT int nvmlDeviceGetGpuFabricInfo(Device *d, FabricInfo *out) {
    DEVICE_CALL(d);
    TRY(datacenter(d));
    REQUIRE(out);
    *out = (FabricInfo){.state = FABRIC_STATE_COMPLETED};
    return OK;
}

EXPORT int nvmlDeviceGetGpuFabricInfoV(Device *d, FabricInfoV3 *out) {
    enum { NOTHING_DEGRADED = 0x0aa, HEALTHY = 1 };
    DEVICE_CALL(d);
    TRY(datacenter(d));
    REQUIRE(out);
    out->status = out->clique = 0;
    out->state = FABRIC_STATE_COMPLETED;
    out->health_mask = NOTHING_DEGRADED;
    if (out->version >> 24 >= 3) /* a caller of version 2 has no room for it */
        out->health_summary = HEALTHY;
    return OK;
}
