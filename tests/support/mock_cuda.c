/* The few functions of libcuda.so.1 that ask for UUIDs, for tests/client/frameworks/test_cuda_devices.py.
 *
 * MOCK_CUDA_UUIDS: one digit a device, in CUDA's order, that its UUID is made of. MOCK_CUDA_MIG: the digit of the
 * instance's own UUID where each device is a MIG instance. MOCK_CUDA_FAILS: the function that fails.
 * Compiled with OLD, the library is one of a driver before 470.
 */
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, UNKNOWN = 999 };

static int initialized;

static const char *setting(const char *name) {
    const char *value = getenv(name);
    return value ? value : "";
}

static int fails(const char *function) { return strcmp(setting("MOCK_CUDA_FAILS"), function) == 0; }

static int answer(char uuid[16], const char *digits, int device) {
    if (device < 0 || device >= (int)strlen(digits)) return INVALID_DEVICE;
    memset(uuid, 0x11 * (digits[device] - '0'), 16);
    return SUCCESS;
}

int cuInit(unsigned flags) {
    (void)flags;
    initialized = 1;
    return SUCCESS;
}

int cuDeviceGetCount(int *count) {
    if (!initialized) return NOT_INITIALIZED;
    if (fails("cuDeviceGetCount")) return UNKNOWN;
    *count = (int)strlen(setting("MOCK_CUDA_UUIDS"));
    return SUCCESS;
}

int cuDeviceGet(int *device, int ordinal) {
    if (fails("cuDeviceGet")) return UNKNOWN;
    *device = ordinal;
    return SUCCESS;
}

int cuDeviceGetUuid(char uuid[16], int device) {
    if (fails("cuDeviceGetUuid")) return UNKNOWN;
    return answer(uuid, setting("MOCK_CUDA_UUIDS"), device);
}

#ifndef OLD
int cuDeviceGetUuid_v2(char uuid[16], int device) {
    if (fails("cuDeviceGetUuid_v2")) return UNKNOWN;
    const char *instances = setting("MOCK_CUDA_MIG");
    return answer(uuid, *instances ? instances : setting("MOCK_CUDA_UUIDS"), device);
}
#endif
