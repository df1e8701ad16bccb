/* What NVML's binary interface fixes: result codes, and the layouts that more than one file fills.
 * Source of every layout in this folder: the ctypes declarations of nvidia-ml-py. No NVIDIA header is used.
 */
#ifndef MOCK_NVML_ABI_H
#define MOCK_NVML_ABI_H

typedef unsigned int u32;
typedef unsigned long long u64;

enum {
    OK = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    TIMEOUT = 10,
    FUNCTION_NOT_FOUND = 13,
    GPU_IS_LOST = 15,
    ARGUMENT_VERSION_MISMATCH = 25,
    DEPRECATED = 26,
    UNKNOWN = 999,
};

/* NVML_VALUE_NOT_AVAILABLE: unknown to the driver, e.g. a process's memory inside a container or under WDDM.
 */
#define VALUE_NOT_AVAILABLE (~0ULL)
/* GPU or compute instance id of what runs on an undivided GPU. */
#define NO_INSTANCE (~0u)

enum ClockType { GRAPHICS_CLOCK, SM_CLOCK, MEMORY_CLOCK, VIDEO_CLOCK, CLOCK_TYPES };

typedef struct {
    char bus_id_legacy[16];
    u32 domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
} PciInfo;
_Static_assert(sizeof(PciInfo) == 68, "nvmlPciInfo_t");

typedef union {
    double real;
    u32 number;
    u64 large;
    int with_sign;
} Value;
enum ValueType { VALUE_U32 = 1, VALUE_U64 = 3, VALUE_INT = 5 };

#endif
