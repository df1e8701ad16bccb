/* Clocks, performance states and the reasons for lower clocks. */
#include "mock.h"

enum {
    MAX_GRAPHICS_MHZ = 1980,
    MIN_GRAPHICS_MHZ = 345,
    GRAPHICS_STEP_MHZ = 15,
    MEMORY_MHZ = 2619,
    MAX_VIDEO_MHZ = 1545
};

static u32 performance_state(int gpu) {
    return (u32)setting(gpu, "pstate", utilization(gpu) > 5 ? 0 : 8);
}

GET_U32(nvmlDeviceGetPerformanceState, whole, performance_state(d->gpu))
GET_U32(nvmlDeviceGetPowerState, whole, performance_state(d->gpu))

static u32 most_mhz(u32 type) {
    return type == MEMORY_CLOCK ? MEMORY_MHZ : type == VIDEO_CLOCK ? MAX_VIDEO_MHZ : MAX_GRAPHICS_MHZ;
}

static int clock_of(const Device *d, u32 type, bool most, u32 *out) {
    TRY(whole(d));
    REQUIRE(out && type < CLOCK_TYPES);
    *out = most ? most_mhz(type) : clock_mhz(d->gpu, type);
    return OK;
}

EXPORT int nvmlDeviceGetClockInfo(Device *d, u32 type, u32 *out) {
    DEVICE_CALL(d);
    return clock_of(d, type, false, out);
}

EXPORT int nvmlDeviceGetMaxClockInfo(Device *d, u32 type, u32 *out) {
    DEVICE_CALL(d);
    return clock_of(d, type, true, out);
}

EXPORT int nvmlDeviceGetMaxCustomerBoostClock(Device *d, u32 type, u32 *out) {
    DEVICE_CALL(d);
    return clock_of(d, type, true, out);
}

EXPORT int nvmlDeviceGetClock(Device *d, u32 type, u32 which, u32 *out) {
    enum { CURRENT, APPLICATION_TARGET, APPLICATION_DEFAULT, CUSTOMER_BOOST_MAX };
    DEVICE_CALL(d);
    REQUIRE(which <= CUSTOMER_BOOST_MAX);
    return clock_of(d, type, which != CURRENT, out);
}

/* Application clocks are DEPRECATED in driver 590.48.01. */
EXPORT int nvmlDeviceGetApplicationsClock(Device *d, UNUSED u32 type, UNUSED u32 *out) {
    DEVICE_CALL(d);
    return DEPRECATED;
}

EXPORT int nvmlDeviceGetDefaultApplicationsClock(Device *d, UNUSED u32 type, UNUSED u32 *out) {
    DEVICE_CALL(d);
    return DEPRECATED;
}

static int room_for(u32 wanted, u32 *count, const u32 *out) {
    REQUIRE(count);
    bool fits = out && *count >= wanted;
    *count = wanted;
    return fits ? OK : INSUFFICIENT_SIZE;
}

EXPORT int nvmlDeviceGetSupportedMemoryClocks(Device *d, u32 *count, u32 *out) {
    DEVICE_CALL(d);
    TRY(whole(d));
    TRY(room_for(1, count, out));
    out[0] = MEMORY_MHZ;
    return OK;
}

EXPORT int nvmlDeviceGetSupportedGraphicsClocks(Device *d, UNUSED u32 memory_mhz, u32 *count, u32 *out) {
    const u32 steps = (MAX_GRAPHICS_MHZ - MIN_GRAPHICS_MHZ) / GRAPHICS_STEP_MHZ + 1;
    DEVICE_CALL(d);
    TRY(whole(d));
    TRY(room_for(steps, count, out));
    for (u32 i = 0; i < steps; i++)
        out[i] = MAX_GRAPHICS_MHZ - GRAPHICS_STEP_MHZ * i;
    return OK;
}

EXPORT int nvmlDeviceGetMinMaxClockOfPState(Device *d, UNUSED u32 type, UNUSED u32 state, u32 *least,
                                            u32 *most) {
    DEVICE_CALL(d);
    TRY(whole(d));
    REQUIRE(least && most);
    *least = MIN_GRAPHICS_MHZ;
    *most = MAX_GRAPHICS_MHZ;
    return OK;
}

EXPORT int nvmlDeviceGetAutoBoostedClocksEnabled(Device *d, UNUSED u32 *enabled, UNUSED u32 *by_default) {
    DEVICE_CALL(d);
    return NOT_SUPPORTED;
}

static u64 event_reasons(int gpu) {
    enum { GPU_IDLE = 1, SW_POWER_CAP = 4 };
    double busy = utilization(gpu);
    return (u64)setting(gpu, "throttle", busy < 5 ? GPU_IDLE : busy > 90 ? SW_POWER_CAP : 0);
}

GET_U64(nvmlDeviceGetCurrentClocksThrottleReasons, whole, event_reasons(d->gpu))
GET_U64(nvmlDeviceGetCurrentClocksEventReasons, whole, event_reasons(d->gpu))
GET_U64(nvmlDeviceGetSupportedClocksThrottleReasons, whole, 0x1ff)
GET_U64(nvmlDeviceGetSupportedClocksEventReasons, whole, 0x1ff)

typedef struct {
    u64 reference_time, violation_time;
} Violation;

/* Clocks held down: 2 ms a second by the power policy, 4 ms a second by the thermal one. */
EXPORT int nvmlDeviceGetViolationStatus(Device *d, u32 policy, Violation *out) {
    enum { POWER, THERMAL, RELIABILITY = 5, TOTAL_APPLICATION_CLOCKS = 10, TOTAL_BASE_CLOCKS = 11 };
    DEVICE_CALL(d);
    TRY(whole(d));
    REQUIRE(policy <= RELIABILITY || policy == TOTAL_APPLICATION_CLOCKS || policy == TOTAL_BASE_CLOCKS);
    REQUIRE(out);
    double ns_per_second = policy == POWER ? 2e6 : policy == THERMAL ? 4e6 : 0;
    *out = (Violation){(u64)(uptime() * 1e6), (u64)(uptime() * ns_per_second)};
    return OK;
}
