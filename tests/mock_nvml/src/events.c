/* Events: only critical Xids happen here, each when an `xid` line of a new sequence number stands in the
 * control file. */
#include "mock.h"
#include <stdlib.h>

enum { SINGLE_BIT_ECC = 1, DOUBLE_BIT_ECC = 2, XID_CRITICAL_ERROR = 8, WAIT_POLL_US = 20000 };

typedef struct {
    u64 types[MAX_GPUS]; /* what each GPU is registered for */
    u64 seen;
} EventSet;
typedef struct {
    Device *device;
    u64 type, data;
    u32 gpu_instance, compute_instance;
} EventData;

GET_U64(nvmlDeviceGetSupportedEventTypes, whole, options.model->datacenter ? 0x719f : 0x1c)

/* A new set sees only what happens from now on. */
EXPORT int nvmlEventSetCreate(EventSet **out) {
    SYSTEM_CALL();
    REQUIRE(out);
    *out = calloc(1, sizeof **out);
    (*out)->seen = latest_xid();
    return OK;
}

EXPORT int nvmlEventSetFree(EventSet *set) {
    SYSTEM_CALL();
    free(set);
    return OK;
}

EXPORT int nvmlDeviceRegisterEvents(Device *d, u64 types, EventSet *set) {
    DEVICE_CALL(d);
    TRY(whole(d));
    REQUIRE(set);
    if (!options.model->datacenter && types & (SINGLE_BIT_ECC | DOUBLE_BIT_ECC))
        return NOT_SUPPORTED;
    set->types[d->gpu] |= types;
    return OK;
}

static bool listens(const void *set, int gpu) {
    return ((const EventSet *)set)->types[gpu] & XID_CRITICAL_ERROR;
}

static int wait_for_event(EventSet *set, EventData *out, u32 timeout_ms) {
    REQUIRE(set && out);
    double end = seconds() + timeout_ms * 1e-3;
    Xid xid;
    while (!next_xid(set->seen, listens, set, &xid)) {
        double left_us = (end - seconds()) * 1e6;
        if (left_us <= 0)
            return TIMEOUT;
        pause_us(left_us < WAIT_POLL_US ? left_us : WAIT_POLL_US);
        follow_control();
    }
    set->seen = xid.sequence;
    *out = (EventData){whole_device(xid.gpu), XID_CRITICAL_ERROR, xid.code, NO_INSTANCE, NO_INSTANCE};
    return OK;
}

EXPORT int nvmlEventSetWait_v2(EventSet *set, EventData *out, u32 timeout_ms) {
    SYSTEM_CALL();
    return wait_for_event(set, out, timeout_ms);
}

EXPORT int nvmlEventSetWait(EventSet *set, EventData *out, u32 timeout_ms) {
    SYSTEM_CALL();
    return wait_for_event(set, out, timeout_ms);
}
