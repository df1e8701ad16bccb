/* Field values: one call, many readings. Which fields an H100 answers follows recordings under driver
 * 590.48.01. */
#include "mock.h"

enum { THIS_GPU = ~0u }; /* a scope id that asks for the sum over all links */
typedef struct {
    u32 field, scope;
    int64_t timestamp, latency_us;
    u32 value_type, result;
    Value value;
} FieldValue;
_Static_assert(sizeof(FieldValue) == 40, "nvmlFieldValue_t");

static int give_u32(FieldValue *f, double value) {
    f->value_type = VALUE_U32;
    f->value = (Value){.large = 0};
    f->value.number = (u32)value;
    return OK;
}

static int give_u64(FieldValue *f, double value) {
    f->value_type = VALUE_U64;
    f->value.large = (u64)value;
    return OK;
}

static int give_int(FieldValue *f, int value) {
    f->value_type = VALUE_INT;
    f->value = (Value){.large = 0};
    f->value.with_sign = value;
    return OK;
}

static bool between(u32 id, u32 first, u32 last) {
    return id >= first && id <= last;
}

static int ecc_or_remapping_field(int gpu, FieldValue *f) {
    switch (f->field) {
    case 1:
    case 2: return give_u32(f, 1); /* ECC current and pending mode */
    case 3:
    case 11: return give_u64(f, ecc_errors(gpu, false, false));
    case 4:
    case 12: return give_u64(f, ecc_errors(gpu, true, false));
    case 5:
    case 22: return give_u64(f, ecc_errors(gpu, false, true));
    case 6:
    case 23: return give_u64(f, ecc_errors(gpu, true, true));
    case 142: return give_u32(f, setting(gpu, "remap_cor", 0));
    case 143: return give_u32(f, setting(gpu, "remap_unc", 0));
    case 144: return give_u32(f, setting(gpu, "remap_pending", 0));
    case 145: return give_u32(f, setting(gpu, "remap_failed", 0));
    case 226:
    case 227:
    case 230: return give_u32(f, setting(gpu, "recovery", 0)); /* reset, drain, action */
    default:
        return between(f->field, 7, 28) ? give_u64(f, 0) : NOT_SUPPORTED; /* retired pages: none */
    }
}

static int power_or_thermal_field(int gpu, FieldValue *f) {
    switch (f->field) {
    case 74:
    case 75: return give_u64(f, 2e6 * uptime()); /* ns held down by the power and the thermal policy */
    case 76:
    case 77:
    case 78:
    case 79:
    case 80:
    case 81: return give_u64(f, 0);                      /* by the other policies */
    case 82: return give_u32(f, temperature(gpu) - 4.0); /* memory temperature */
    case 83:
    case 191: return give_u64(f, energy_mj(gpu));
    case 185: /* average, */
    case 186: /* instant; of the GPU alone, not of a module or of its memory */
        return f->scope ? NOT_SUPPORTED : give_u32(f, watts(gpu) * 1000);
    case 187: return give_u32(f, 200000);
    case 188:
    case 189: return give_u32(f, options.model->limit_mw);
    case 190:
    case 192: return give_u32(f, setting(gpu, "limit", options.model->limit_mw));
    case 193: return give_int(f, -8); /* T.Limit: shutdown, */
    case 194: return give_int(f, -2); /* slowdown, */
    case 195:
    case 196: return give_int(f, 0); /* memory and GPU maximum */
    case 269:
    case 270:
    case 271: return give_u64(f, 0); /* ns of clock event reasons */
    default: return NOT_SUPPORTED;
    }
}

/* 138-141: data sent, data received, raw sent, raw received, in KiB; raw adds the protocol's 15 %. */
static int nvlink_throughput_field(int gpu, FieldValue *f) {
    REQUIRE(f->scope == THIS_GPU || f->scope < options.model->nvlinks);
    bool raw = f->field >= 140;
    if ((f->scope == THIS_GPU && !setting(gpu, "nvlink_sum", 1)) || (!raw && !setting(gpu, "nvlink_data", 1)))
        return give_u64(f, 0);
    double kib_per_second = (f->field % 2 ? 1.1e6 : 0.9e6) * (raw ? 1.15 : 1);
    double links = f->scope == THIS_GPU ? options.model->nvlinks : 1 + 0.02 * f->scope;
    return give_u64(f, cumulated(gpu, kib_per_second * links, 60));
}

static int link_field(int gpu, FieldValue *f) {
    switch (f->field) {
    case 91:
    case 147: return give_u32(f, options.model->nvlinks);
    case 94: return give_u32(f, setting(gpu, "pcie_replay", 0));
    case 95: return give_u32(f, 0);  /* replay counter's rollovers */
    case 170: return give_u32(f, 0); /* links to the CPU: a superchip's */
    case 138:
    case 139:
    case 140:
    case 141: return nvlink_throughput_field(gpu, f);
    case 161: /* replay, recovery, CRC */
    case 162:
    case 163: REQUIRE(f->scope < options.model->nvlinks); return give_u64(f, setting(gpu, "nvlink_errors", 0));
    case 165:
        REQUIRE(f->scope < options.model->nvlinks);
        return give_u32(f, setting(gpu, "nvlink_down", -1) != f->scope);
    case 166: return give_u32(f, 7);                         /* NVLink version code */
    case 197: return give_u64(f, cumulated(gpu, 4.5e8, 20)); /* PCIe bytes sent and received */
    case 198: return give_u64(f, cumulated(gpu, 9e8, 20));
    default: break; /* 201 to 222 are of NVLink 5 */
    }
    bool speed = between(f->field, 84, 90) || f->field == 164; /* MB/s a link */
    bool errors = between(f->field, 32, 73) || between(f->field, 96, 131) || between(f->field, 148, 160) ||
                  f->field == 169 || between(f->field, 173, 183);
    return speed ? give_u32(f, 26562) : errors ? give_u64(f, 0) : NOT_SUPPORTED;
}

/* Every card reports the power, thermal and sync-boost policies, its energy, PCIe replays and power readings.
 */
static bool datacenter_alone(u32 id) {
    bool of_all = between(id, 74, 76) || id == 83 || id == 94 || id == 95 || between(id, 169, 196);
    return id <= 234 && !of_all;
}

static int field(int gpu, FieldValue *f) {
    if (f->field == 82 && !options.model->memory)
        return give_u32(f, 0); /* what DCGM shows of a GB10, whose memory has no sensor (rwlove/home-ops 13238) */
    if (datacenter_alone(f->field) && !options.model->datacenter)
        return NOT_SUPPORTED;
    if (between(f->field, 187, 192) && f->field != 191 && !options.model->limit_mw)
        return NOT_SUPPORTED;
    int result = ecc_or_remapping_field(gpu, f);
    if (result == NOT_SUPPORTED)
        result = power_or_thermal_field(gpu, f);
    return result == NOT_SUPPORTED ? link_field(gpu, f) : result;
}

EXPORT int nvmlDeviceGetFieldValues(Device *d, int count, FieldValue *values) {
    DEVICE_CALL(d);
    REQUIRE(values && count > 0);
    pause_us((double)options.field_delay_us * count);
    int64_t now = (int64_t)wall_clock_us();
    for (int i = 0; i < count; i++) {
        values[i].timestamp = now;
        values[i].latency_us = 1;
        values[i].result = (u32)(d->mig == WHOLE ? field(d->gpu, &values[i]) : NOT_SUPPORTED);
    }
    return OK;
}

EXPORT int nvmlDeviceClearFieldValues(Device *d, int count, FieldValue *values) {
    DEVICE_CALL(d);
    REQUIRE(values);
    for (int i = 0; i < count; i++)
        values[i].result = NOT_SUPPORTED;
    return OK;
}

typedef struct {
    u64 timestamp;
    Value value;
} Sample;

EXPORT int nvmlDeviceGetSamples(Device *d, u32 type, UNUSED u64 since, u32 *value_type, u32 *count,
                                Sample *out) {
    enum {
        TOTAL_POWER,
        LAST_UTILIZATION = 4,
        MEMORY_CLOCK_SAMPLES = 6,
        TYPES = 10,
        RING_SIZE = 120,
        FILLED = 60
    };
    enum { PERIOD_US = 20000 };
    DEVICE_CALL(d);
    TRY(whole(d));
    REQUIRE(value_type && count && type < TYPES);
    *value_type = VALUE_U32;
    *count = !out ? RING_SIZE : *count < FILLED ? *count : FILLED;
    double mhz = clock_mhz(d->gpu, type == MEMORY_CLOCK_SAMPLES ? MEMORY_CLOCK : SM_CLOCK);
    double value = type == TOTAL_POWER        ? watts(d->gpu) * 1000
                   : type <= LAST_UTILIZATION ? utilization(d->gpu)
                                              : mhz;
    for (u32 i = 0; out && i < *count; i++) {
        out[i] = (Sample){.timestamp = wall_clock_us() - (*count - i) * PERIOD_US};
        out[i].value.number = (u32)value;
    }
    return OK;
}
