/* Events: critical Xids, each when an `xid` line of a new sequence number stands in the control file, and
 * operational events, likewise by an `operational` line. */
#include "mock.h"
#include <libgen.h>
#include <limits.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <unistd.h>

enum { SINGLE_BIT_ECC = 1, DOUBLE_BIT_ECC = 2, XID_CRITICAL_ERROR = 8 };

enum { NVML_EVENT, OPERATIONAL_EVENT };
enum { CONTEXT_UNKNOWN, CONTEXT_LEGACY_XID };
enum { FIRST_OPERATIONAL_DRIVER = 615 };

typedef struct {
    u64 types[MAX_GPUS];      /* what each GPU is registered for */
    bool operational[MAX_GPUS]; /* whether for operational events, */
    u32 least_severity[MAX_GPUS]; /* of this severity or a graver one */
    u64 seen;
    Xid last; /* what nvmlEventSetWait_v3 returned, whose contexts can be asked for */
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

static bool listens(const void *set, const Xid *xid) {
    return !xid->operational && !xid->binding && ((const EventSet *)set)->types[xid->gpu] & XID_CRITICAL_ERROR;
}

static bool listens_to_both(const void *listener, const Xid *xid) {
    const EventSet *set = listener;
    bool operational = set->operational[xid->gpu] && xid->severity >= set->least_severity[xid->gpu];
    return xid->operational ? operational : listens(set, xid);
}

/* A descriptor that becomes readable when the control file is replaced: a wait costs as little as a driver's. */
static int watch_control(void) {
    int watch = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    char path[PATH_MAX];
    if (watch >= 0 && options.control && strlen(options.control) < sizeof path)
        inotify_add_watch(watch, dirname(strcpy(path, options.control)), IN_MOVED_TO | IN_CLOSE_WRITE);
    return watch;
}

bool wait_for_xid(u64 seen, const void *set, Xid *xid, u32 timeout_ms, bool (*wanted)(const void *, const Xid *)) {
    struct pollfd watch = {.fd = watch_control(), .events = POLLIN};
    double end = seconds() + timeout_ms * 1e-3;
    char news[4096];
    bool found;
    follow_control(); /* it may have changed before the watch began */
    while (!(found = next_xid(seen, wanted, set, xid))) {
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
    if (!wait_for_xid(set->seen, set, &xid, timeout_ms, listens))
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

/* Operational events, in drivers from R615 on. */

typedef struct {
    char uuid[96];
    u32 least_log_level, least_severity;
} OperationalConfig;
_Static_assert(sizeof(OperationalConfig) == 104, "nvmlGpuOperationalEventConfig_v1_t");

typedef struct {
    u32 timeout_ms, data_type;
    char uuid[96], source_module[16];
    u64 type, data, group_cursor, instance, timestamp_us, trace;
    u32 gpu_instance, compute_instance, severity, category, module_event_code, scope, originator, module_instance;
    u32 chiplet, log_level, attributes, group_cper_size, group_attributes;
    unsigned char group_size, group_index;
} EventWait;
_Static_assert(sizeof(EventWait) == 224, "nvmlEventSetWait_v3_t");

typedef struct {
    u32 count;
} ContextCount;
typedef struct {
    u32 index, type, source_type, data_size;
    unsigned short format_version;
} ContextInfo;
_Static_assert(sizeof(ContextInfo) == 20, "nvmlEventSetGetContextInfo_v1_t");
typedef struct {
    void *data;
    u32 index, data_size;
} ContextData;
_Static_assert(sizeof(ContextData) == 16, "nvmlEventSetGetContextData_v1_t");
typedef struct {
    u32 index, code;
} LegacyXid;

#define OPERATIONAL_CALL()                                                                                   \
    if (atoi(driver_version()) < FIRST_OPERATIONAL_DRIVER)                                                   \
        return FUNCTION_NOT_FOUND;                                                                           \
    SYSTEM_CALL()

EXPORT int nvmlEventSetRegisterGpuOperationalEvents_v1(EventSet *set, const OperationalConfig *config) {
    static Call call;
    if (atoi(driver_version()) < FIRST_OPERATIONAL_DRIVER)
        return FUNCTION_NOT_FOUND;
    REQUIRE(set && config && memchr(config->uuid, 0, sizeof config->uuid));
    const Device *d = device_of_uuid(config->uuid);
    TRY(enter_gpu(&call, __func__, d ? d->gpu : NO_GPU));
    if (!d)
        return NOT_FOUND;
    set->operational[d->gpu] = true;
    set->least_severity[d->gpu] = config->least_severity;
    return OK;
}

/* An event has a first context that only its module can read and, with an Xid, a second one with that. */
static u32 contexts_of(const Xid *event) {
    return !event->operational ? 0 : event->code ? 2 : 1;
}

static void fill_wait(EventWait *out, const Xid *event) {
    *out = (EventWait){.timeout_ms = out->timeout_ms, .gpu_instance = NO_INSTANCE, .compute_instance = NO_INSTANCE};
    out->timestamp_us = event->timestamp_us;
    if (!event->operational) {
        out->type = XID_CRITICAL_ERROR;
        out->data = event->code;
        out->timestamp_us = wall_clock_us();
    } else {
        out->data_type = OPERATIONAL_EVENT;
        memcpy(out->source_module, "GPU-OPERATIONAL-", sizeof out->source_module); /* without a final NUL */
        out->module_event_code = 3;
        out->log_level = 50;
        out->instance = event->sequence;
        out->severity = event->severity;
        out->category = event->category;
        out->attributes = event->attributes;
        out->group_attributes = event->group_attributes;
        out->group_cursor = event->group;
        out->group_size = 1;
    }
    write_uuid(whole_device(event->gpu), out->uuid);
}

EXPORT int nvmlEventSetWait_v3(EventSet *set, EventWait *out) {
    OPERATIONAL_CALL();
    REQUIRE(set && out);
    Xid event;
    if (!wait_for_xid(set->seen, set, &event, out->timeout_ms, listens_to_both))
        return TIMEOUT;
    set->seen = event.sequence;
    set->last = event;
    fill_wait(out, &event);
    return OK;
}

EXPORT int nvmlEventSetGetContextCount_v1(EventSet *set, ContextCount *out) {
    OPERATIONAL_CALL();
    REQUIRE(set && out);
    out->count = contexts_of(&set->last);
    return OK;
}

EXPORT int nvmlEventSetGetContextInfo_v1(EventSet *set, ContextInfo *out) {
    OPERATIONAL_CALL();
    REQUIRE(set && out && out->index < contexts_of(&set->last));
    *out = (ContextInfo){.index = out->index, .type = out->index ? CONTEXT_LEGACY_XID : CONTEXT_UNKNOWN};
    out->data_size = out->index ? sizeof(u32) : 0;
    return OK;
}

EXPORT int nvmlEventSetGetContextData_v1(EventSet *set, ContextData *out) {
    OPERATIONAL_CALL();
    REQUIRE(set && out && out->index < contexts_of(&set->last));
    u32 room = out->data_size, code = (u32)set->last.code;
    out->data_size = out->index ? sizeof code : 0;
    if (out->data && room < out->data_size)
        return INSUFFICIENT_SIZE;
    if (out->data)
        memcpy(out->data, &code, out->data_size);
    return OK;
}

EXPORT int nvmlEventSetGetGpuOperationalEventContextLegacyXid_v1(EventSet *set, LegacyXid *out) {
    OPERATIONAL_CALL();
    REQUIRE(set && out && out->index == CONTEXT_LEGACY_XID && out->index < contexts_of(&set->last));
    out->code = (u32)set->last.code;
    return OK;
}
