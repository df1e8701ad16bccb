/* The mock's own vocabulary: its options, its devices, the rules in force, and how every exported function
 * begins. */
#ifndef MOCK_NVML_MOCK_H
#define MOCK_NVML_MOCK_H

#include "abi.h"
#include <stdbool.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define UNUSED __attribute__((unused))

enum { MAX_GPUS = 256, MAX_MIG = 8, MAX_PIDS = 512, MAX_PROCESSES = 64 };

/* -- mig.c: how a GPU is divided now -- */
typedef struct {
    const char *name;
    u32 compute_slices, gpu_slices, memory_eighths, multiprocessors, copy_engines, decoders, jpeg, ofa;
    int first_id;    /* of its GPU instances */
    int per_gpu_instance; /* compute instances */
} MigProfile;
typedef struct {
    bool enabled;
    int count, generation;
    const MigProfile *profile[MAX_MIG];
} MigLayout;
MigLayout even_layout(int instances);
bool parse_layout(char *profiles, MigLayout *out);
const MigLayout *layout_of(int gpu);
int gpu_instance_of(const MigLayout *layout, int position);
int compute_instance_of(const MigLayout *layout, int position);

/* -- options.c: what the environment asked for, fixed for the life of the process -- */
typedef struct {
    const char *name;
    bool datacenter; /* ECC, row remapping, NVLink, a serial number, MIG and GPM; no fans */
    u64 memory, bar1; /* no memory: it is the machine's, of which the driver reports nothing */
    u32 brand, architecture, compute_major, compute_minor, memory_bus_width, pci_id;
    u32 pcie_generation, pcie_width, pcie_speed_mbps, pcie_max_speed_code, nvlinks, fans;
    u32 limit_mw; /* 0: no power limits */
} Model;
typedef struct {
    const Model *model;
    int gpus, processes_per_gpu, pid_count, pids[MAX_PIDS];
    MigLayout layout; /* of each GPU, until a rule says otherwise */
    long delay_us, field_delay_us;
    bool frozen, spin;
    enum { LOCK_NONE, LOCK_GPU, LOCK_GLOBAL } lock;
    const char *driver, *control, *counters, *devices;
} Options;
extern Options options;
void read_options(void);
double named_delay_us(const char *function, double otherwise);
/* A mistake in a test's own setup must not pass for a driver's answer: say it and stop the process. */
_Noreturn void refuse(const char *what, const char *value);

/* -- devices.c: a handle is a pointer into one of its tables -- */
typedef struct {
    int gpu;
    int mig; /* WHOLE, or the number of a MIG instance on that GPU */
} Device;
enum { WHOLE = -1, NO_GPU = -1 };
void make_devices(void);
bool is_device(const void *handle);
bool is_present(const Device *d); /* false: a MIG instance that was destroyed */
void enumerate_gpus(void);        /* as a new session of NVML does */
bool is_listed(int gpu);          /* the session has it, and it has been bound to the driver since */
Device *listed_gpu(int position); /* NULL: none */
Device *whole_device(int gpu);
Device *mig_device(int gpu, int instance);
Device *device_of_uuid(const char *text); /* handles.c; NULL: none */
void write_uuid(const Device *d, char out[96]);
u32 id_of_gpu(int gpu);
int live_gpus(void);
/* What a device refuses; each gives OK or NOT_SUPPORTED. */
int any(const Device *d);
int whole(const Device *d);
int undivided(const Device *d);
int datacenter(const Device *d);
int has_fans(const Device *d);
int has_memory(const Device *d);
int has_power_limit(const Device *d);

/* -- rules.c: the control file -- */
typedef struct {
    u32 pid;
    u64 memory; /* bytes, or VALUE_NOT_AVAILABLE */
} Process;
typedef struct {
    int count;
    Process process[MAX_PROCESSES];
} Processes;
enum ProcessKind { COMPUTE, GRAPHICS };
typedef struct {
    u64 sequence;
    int gpu;
    u64 code; /* 0: an operational event without an Xid */
    enum { NO_BINDING, UNBOUND, BOUND } binding; /* instead of an Xid, a system event */
    bool operational; /* with what follows */
    u32 severity, category, attributes, group_attributes;
    u64 group, timestamp_us;
} Xid;
typedef struct {
    u64 soft, hard, used; /* bytes */
} MemoryLimits;
typedef struct {
    bool hangs;
    double delay_us; /* negative: no rule */
    int error;
} Verdict;
void follow_control(void);
double setting(int gpu, const char *key, double otherwise);
Verdict verdict(int gpu, const char *function);
const char *driver_version(void);
Processes processes_of(int gpu, enum ProcessKind kind);
const MigLayout *declared_layout(int gpu); /* NULL: no rule */
const MemoryLimits *memory_limits_of(int gpu, const char *cgroup); /* NULL: any cgroup; no rule */
u64 latest_xid(void);
bool is_bound(int gpu, u64 *since); /* by the newest rule, whose sequence number is `since` */
bool next_xid(u64 after, bool (*wanted)(const void *listener, const Xid *xid), const void *listener, Xid *out);

/* -- events.c -- */
bool wait_for_xid(u64 seen, const void *set, Xid *xid, u32 timeout_ms, bool (*wanted)(const void *, const Xid *));

/* -- result_codes.c -- */
int code_named(const char *name); /* negative: no such name */

/* -- calls.c: count, delay, hang, fail -- */
typedef struct Counter Counter;
typedef _Atomic(Counter *) Call;
void open_counters(void);
void pause_us(double us);
double seconds(void);
u64 wall_clock_us(void);
int enter_before_init(Call *call, const char *function);
int enter_system(Call *call, const char *function);
int enter_gpu(Call *call, const char *function, int gpu);
int enter_device(Call *call, const char *function, const Device *d);
bool is_initialized(void);
void hold_device(int gpu);

#define TRY(expression)                                                                                      \
    do {                                                                                                     \
        int result_ = (expression);                                                                          \
        if (result_ != OK)                                                                                   \
            return result_;                                                                                  \
    } while (0)
#define REQUIRE(condition) TRY((condition) ? OK : INVALID_ARGUMENT)
#define SYSTEM_CALL()                                                                                        \
    static Call call_;                                                                                       \
    TRY(enter_system(&call_, __func__))
#define DEVICE_CALL(d)                                                                                       \
    static Call call_;                                                                                       \
    TRY(enter_device(&call_, __func__, d))

/* An exported function that answers one number about a device. */
#define GETTER(type, name, refusal, value)                                                                   \
    EXPORT int name(Device *d, type *out) {                                                                  \
        DEVICE_CALL(d);                                                                                      \
        TRY(refusal(d));                                                                                     \
        REQUIRE(out);                                                                                        \
        *out = (type)(value);                                                                                \
        return OK;                                                                                           \
    }
#define GET_U32(name, refusal, value) GETTER(u32, name, refusal, value)
#define GET_U64(name, refusal, value) GETTER(u64, name, refusal, value)
int copy_text(char *to, u32 size, const char *text);

/* -- physics.c: the simulated hardware; it moves with the monotonic clock unless frozen -- */
void start_clock(void);
double uptime(void);
double wave(int gpu, double period, double phase);
double cumulated(int gpu, double rate, double period);
double utilization(int gpu);
double watts(int gpu);
u32 temperature(int gpu);
u32 clock_mhz(int gpu, enum ClockType type);
u64 memory_used(int gpu);
u64 memory_of(const Processes *list);
Processes processes_on(const Device *d, enum ProcessKind kind);
u64 memory_total(int gpu);
u64 memory_reserved(void);
u64 ecc_errors(int gpu, bool uncorrected, bool aggregate);
u64 energy_mj(int gpu);
void settle_energy(void);
void restart_energy(void);

#endif
