/* Temperatures and fans. */
#include "mock.h"

GET_U32(nvmlDeviceGetNumFans, whole, options.model->fans)

EXPORT int nvmlDeviceGetTemperature(Device *d, u32 sensor, u32 *out) {
    DEVICE_CALL(d);
    TRY(whole(d));
    REQUIRE(out && sensor == 0);
    *out = temperature(d->gpu);
    return OK;
}

typedef struct {
    u32 version, sensor;
    int celsius;
} TemperatureV1;

EXPORT int nvmlDeviceGetTemperatureV(Device *d, TemperatureV1 *out) {
    DEVICE_CALL(d);
    TRY(whole(d));
    REQUIRE(out);
    if (out->version != (1u << 24 | sizeof *out))
        return ARGUMENT_VERSION_MISMATCH;
    REQUIRE(out->sensor == 0);
    out->celsius = (int)temperature(d->gpu);
    return OK;
}

EXPORT int nvmlDeviceGetTemperatureThreshold(Device *d, u32 type, u32 *out) {
    enum {
        TYPES = 8
    }; /* shutdown, slowdown, memory max, GPU max, acoustic min / current / max, GPS current */
    static const u32 h100[TYPES] = {92, 89, 95, 87}, geforce[TYPES] = {92, 89, 0, 87, 65, 84, 90};
    DEVICE_CALL(d);
    TRY(whole(d));
    REQUIRE(out && type < TYPES);
    u32 celsius = options.model->datacenter ? h100[type] : geforce[type];
    if (!celsius)
        return NOT_SUPPORTED;
    *out = celsius;
    return OK;
}

typedef struct {
    u32 version;
    int celsius;
} Margin;

EXPORT int nvmlDeviceGetMarginTemperature(Device *d, Margin *out) {
    DEVICE_CALL(d);
    TRY(whole(d));
    REQUIRE(out);
    if (out->version != (1u << 24 | sizeof *out))
        return ARGUMENT_VERSION_MISMATCH;
    out->celsius = 85 - (int)temperature(d->gpu);
    return OK;
}

typedef struct {
    u32 count;
    struct {
        int controller, default_min, default_max, current, target;
    } sensor[3];
} ThermalSettings;

EXPORT int nvmlDeviceGetThermalSettings(Device *d, UNUSED u32 sensor, ThermalSettings *out) {
    enum { TARGET_GPU = 1 };
    DEVICE_CALL(d);
    TRY(whole(d));
    REQUIRE(out);
    *out = (ThermalSettings){.count = 1};
    out->sensor[0].current = (int)temperature(d->gpu);
    out->sensor[0].target = TARGET_GPU;
    return OK;
}

static u32 fan_percent(int gpu) {
    return (u32)(30 + 50 * wave(gpu, 90, 0.9)); /* in step with the temperature */
}

static int fan(const Device *d, u32 number, u32 value, u32 *out) {
    TRY(has_fans(d));
    REQUIRE(out && number < options.model->fans);
    *out = value;
    return OK;
}

EXPORT int nvmlDeviceGetFanSpeed(Device *d, u32 *out) {
    DEVICE_CALL(d);
    return fan(d, 0, fan_percent(d->gpu), out);
}

EXPORT int nvmlDeviceGetFanSpeed_v2(Device *d, u32 number, u32 *out) {
    DEVICE_CALL(d);
    return fan(d, number, fan_percent(d->gpu), out);
}

EXPORT int nvmlDeviceGetTargetFanSpeed(Device *d, u32 number, u32 *out) {
    DEVICE_CALL(d);
    return fan(d, number, fan_percent(d->gpu), out);
}

EXPORT int nvmlDeviceGetFanControlPolicy_v2(Device *d, u32 number, u32 *out) {
    DEVICE_CALL(d);
    return fan(d, number, 0, out);
}

EXPORT int nvmlDeviceGetMinMaxFanSpeed(Device *d, u32 *least, u32 *most) {
    DEVICE_CALL(d);
    TRY(has_fans(d));
    REQUIRE(least && most);
    *least = 30;
    *most = 100;
    return OK;
}

typedef struct {
    u32 version, fan, rpm;
} FanSpeedInfo;

EXPORT int nvmlDeviceGetFanSpeedRPM(Device *d, FanSpeedInfo *out) {
    DEVICE_CALL(d);
    REQUIRE(out);
    return fan(d, out->fan, (u32)(900 + 1500 * wave(d->gpu, 90, 0.9)), &out->rpm);
}
