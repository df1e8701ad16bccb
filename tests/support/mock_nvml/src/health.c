/* ECC errors, row remapping and page retirement. */
#include "mock.h"

enum { VOLATILE_OR_AGGREGATE = 1, CORRECTED_OR_UNCORRECTED = 1 }; /* the greatest valid argument of each */

GET_U32(nvmlDeviceGetDefaultEccMode, datacenter, 1)

EXPORT int nvmlDeviceGetEccMode(Device *d, u32 *current, u32 *pending) {
    DEVICE_CALL(d);
    TRY(datacenter(d));
    REQUIRE(current && pending);
    *current = *pending = 1;
    return OK;
}

EXPORT int nvmlDeviceGetTotalEccErrors(Device *d, u32 uncorrected, u32 aggregate, u64 *out) {
    DEVICE_CALL(d);
    TRY(datacenter(d));
    REQUIRE(out && uncorrected <= CORRECTED_OR_UNCORRECTED && aggregate <= VOLATILE_OR_AGGREGATE);
    *out = ecc_errors(d->gpu, uncorrected, aggregate);
    return OK;
}

/* Per location an H100 with driver 590.48.01 reports only DRAM and SRAM. */
EXPORT int nvmlDeviceGetMemoryErrorCounter(Device *d, u32 uncorrected, u32 aggregate, u32 location,
                                           u64 *out) {
    enum { DRAM = 2, SRAM = 7 };
    DEVICE_CALL(d);
    TRY(datacenter(d));
    REQUIRE(out && uncorrected <= CORRECTED_OR_UNCORRECTED && aggregate <= VOLATILE_OR_AGGREGATE);
    REQUIRE(location <= SRAM);
    if (location != DRAM && location != SRAM)
        return NOT_SUPPORTED;
    *out = location == DRAM ? ecc_errors(d->gpu, uncorrected, aggregate) : 0;
    return OK;
}

typedef struct {
    u64 l1_cache, l2_cache, device_memory, register_file;
} EccErrorCounts;

EXPORT int nvmlDeviceGetDetailedEccErrors(Device *d, u32 uncorrected, u32 aggregate, EccErrorCounts *out) {
    DEVICE_CALL(d);
    TRY(datacenter(d));
    REQUIRE(out);
    *out = (EccErrorCounts){.device_memory = ecc_errors(d->gpu, uncorrected, aggregate)};
    return OK;
}

typedef struct {
    u32 version;
    u64 counts[11]; /* aggregate and volatile: uncorrected by parity and by SEC-DED, corrected; then by unit
                     */
    u32 threshold_exceeded;
} SramEccStatus;

EXPORT int nvmlDeviceGetSramEccErrorStatus(Device *d, SramEccStatus *out) {
    DEVICE_CALL(d);
    TRY(datacenter(d));
    REQUIRE(out);
    *out = (SramEccStatus){.version = out->version};
    return OK;
}

/* Ampere and newer remap rows; they retire no pages. */
EXPORT int nvmlDeviceGetRetiredPages(Device *d, UNUSED u32 cause, UNUSED u32 *count, UNUSED u64 *pages) {
    DEVICE_CALL(d);
    return NOT_SUPPORTED;
}

EXPORT int nvmlDeviceGetRetiredPages_v2(Device *d, UNUSED u32 cause, UNUSED u32 *count, UNUSED u64 *pages,
                                        UNUSED u64 *timestamps) {
    DEVICE_CALL(d);
    return NOT_SUPPORTED;
}

EXPORT int nvmlDeviceGetRetiredPagesPendingStatus(Device *d, UNUSED u32 *pending) {
    DEVICE_CALL(d);
    return NOT_SUPPORTED;
}

EXPORT int nvmlDeviceGetRemappedRows(Device *d, u32 *corrected, u32 *uncorrected, u32 *pending, u32 *failed) {
    DEVICE_CALL(d);
    TRY(datacenter(d));
    REQUIRE(corrected && uncorrected && pending && failed);
    *corrected = (u32)setting(d->gpu, "remap_cor", 0);
    *uncorrected = (u32)setting(d->gpu, "remap_unc", 0);
    *pending = (u32)setting(d->gpu, "remap_pending", 0);
    *failed = (u32)setting(d->gpu, "remap_failed", 0);
    return OK;
}

typedef struct {
    u32 max, high, partial, low, none; /* banks by how many spare rows they have left */
} RowRemapperHistogram;

EXPORT int nvmlDeviceGetRowRemapperHistogram(Device *d, RowRemapperHistogram *out) {
    DEVICE_CALL(d);
    TRY(datacenter(d));
    REQUIRE(out);
    *out = (RowRemapperHistogram){.max = 2560};
    return OK;
}
