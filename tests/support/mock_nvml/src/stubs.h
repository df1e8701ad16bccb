/* What the generated file stubs.c is made of: functions that answer NOT_SUPPORTED once they have counted the
 * call, and met its delay and faults. They are weak: a function written out in another file takes their
 * place. */
#include "mock.h"

#define STUB __attribute__((weak, visibility("default"))) int

#define SYSTEM_STUB(name)                                                                                    \
    STUB name(void) {                                                                                        \
        SYSTEM_CALL();                                                                                       \
        return NOT_SUPPORTED;                                                                                \
    }
#define DEVICE_STUB(name)                                                                                    \
    STUB name(const Device *d) {                                                                             \
        static Call call;                                                                                    \
        TRY(enter_gpu(&call, __func__, is_device(d) ? d->gpu : NO_GPU));                                     \
        return NOT_SUPPORTED;                                                                                \
    }
