/* System events: the driver bound to a GPU or unbound from it, each when a `bind` or `unbind` line of a new sequence
 * number stands in the control file. */
#include "mock.h"
#include <stdlib.h>

enum { UNBIND_EVENT = 1, BIND_EVENT = 2 };

typedef struct {
    u64 types, seen;
} SystemEventSet;

typedef struct {
    u32 version;
    SystemEventSet *set;
} SetRequest;
_Static_assert(sizeof(SetRequest) == 16, "nvmlSystemEventSetCreateRequest_v1_t, nvmlSystemEventSetFreeRequest_v1_t");
typedef struct {
    u32 version;
    u64 types;
    SystemEventSet *set;
} RegisterRequest;
_Static_assert(sizeof(RegisterRequest) == 24, "nvmlSystemRegisterEventRequest_v1_t");
typedef struct {
    u64 type;
    u32 gpu_id;
} SystemEvent;
_Static_assert(sizeof(SystemEvent) == 16, "nvmlSystemEventData_v1_t");
typedef struct {
    u32 version, timeout_ms;
    SystemEventSet *set;
    SystemEvent *data;
    u32 data_size, count;
} WaitRequest;
_Static_assert(sizeof(WaitRequest) == 32, "nvmlSystemEventSetWaitRequest_v1_t");

#define REQUEST(request)                                                                                     \
    SYSTEM_CALL();                                                                                           \
    REQUIRE(request);                                                                                        \
    TRY((request)->version == (1 << 24 | sizeof *(request)) ? OK : ARGUMENT_VERSION_MISMATCH)

static bool listens(const void *listener, const Xid *event) {
    const SystemEventSet *set = listener;
    return event->binding && set->types & (event->binding == BOUND ? BIND_EVENT : UNBIND_EVENT);
}

EXPORT int nvmlSystemEventSetCreate(SetRequest *request) {
    REQUEST(request);
    request->set = calloc(1, sizeof *request->set);
    request->set->seen = latest_xid();
    return OK;
}

EXPORT int nvmlSystemEventSetFree(SetRequest *request) {
    REQUEST(request);
    free(request->set);
    return OK;
}

EXPORT int nvmlSystemRegisterEvents(RegisterRequest *request) {
    REQUEST(request);
    REQUIRE(request->set && !(request->types & ~(u64)(UNBIND_EVENT | BIND_EVENT)));
    request->set->types |= request->types;
    return OK;
}

/* A buffer too small for all pending events is refused, with their number; the events stay. */
EXPORT int nvmlSystemEventSetWait(WaitRequest *request) {
    REQUEST(request);
    SystemEventSet *set = request->set;
    REQUIRE(set && request->data);
    Xid event;
    if (!wait_for_xid(set->seen, set, &event, request->timeout_ms, listens))
        return TIMEOUT;
    u64 seen = set->seen;
    for (request->count = 0; next_xid(seen, listens, set, &event); seen = event.sequence, request->count++)
        if (request->count < request->data_size)
            request->data[request->count] =
                (SystemEvent){event.binding == BOUND ? BIND_EVENT : UNBIND_EVENT, id_of_gpu(event.gpu)};
    if (request->count > request->data_size)
        return INSUFFICIENT_SIZE;
    set->seen = seen;
    return OK;
}
