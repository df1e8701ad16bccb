/* Power and energy, in NVML's units: milliwatts and millijoules. */
#include "mock.h"

static int deprecated(UNUSED const Device *d) {
    return DEPRECATED; /* what driver 590.48.01 answers */
}

GET_U32(nvmlDeviceGetPowerUsage, whole, watts(d->gpu) * 1000)
GET_U64(nvmlDeviceGetTotalEnergyConsumption, whole, energy_mj(d->gpu))
GET_U32(nvmlDeviceGetPowerManagementMode, deprecated, 1)
GET_U32(nvmlDeviceGetPowerManagementLimit, has_power_limit, setting(d->gpu, "limit", options.model->limit_mw))
GET_U32(nvmlDeviceGetEnforcedPowerLimit, has_power_limit, setting(d->gpu, "limit", options.model->limit_mw))
GET_U32(nvmlDeviceGetPowerManagementDefaultLimit, has_power_limit, options.model->limit_mw)

EXPORT int nvmlDeviceGetPowerManagementLimitConstraints(Device *d, u32 *least, u32 *most) {
    DEVICE_CALL(d);
    TRY(has_power_limit(d));
    REQUIRE(least && most);
    *least = 200000;
    *most = options.model->limit_mw;
    return OK;
}
