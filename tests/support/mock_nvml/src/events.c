/* Events: only critical Xids happen here, each when an `xid` line of a new sequence number stands in the
 * control file. */
#include "mock.h"
#include <libgen.h>
#include <limits.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <unistd.h>

enum { SINGLE_BIT_ECC = 1, DOUBLE_BIT_ECC = 2, XID_CRITICAL_ERROR = 8 };

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

/* A descriptor that becomes readable when the control file is replaced: a wait costs as little as a driver's. */
static int watch_control(void) {
    int watch = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    char path[PATH_MAX];
    if (watch >= 0 && options.control && strlen(options.control) < sizeof path)
        inotify_add_watch(watch, dirname(strcpy(path, options.control)), IN_MOVED_TO | IN_CLOSE_WRITE);
    return watch;
}

static bool wait_for_xid(EventSet *set, Xid *xid, u32 timeout_ms) {
    struct pollfd watch = {.fd = watch_control(), .events = POLLIN};
    double end = seconds() + timeout_ms * 1e-3;
    char news[4096];
    bool found;
    follow_control(); /* it may have changed before the watch began */
    while (!(found = next_xid(set->seen, listens, set, xid))) {
        double left_ms = (end - seconds()) * 1e3;
        if (left_ms <= 0)
            break;
        poll(&watch, watch.fd >= 0, (int)left_ms + 1);
        while (watch.fd >= 0 && read(watch.fd, news, sizeof news) > 0)
            ;
        follow_control();
    }
    if (watch.fd >= 0)
        close(watch.fd);
    return found;
}

static int wait_for_event(EventSet *set, EventData *out, u32 timeout_ms) {
    REQUIRE(set && out);
    Xid xid;
    if (!wait_for_xid(set, &xid, timeout_ms))
        return TIMEOUT;
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
