/* The simulated hardware. Values swing with the monotonic clock, each GPU in its own phase; a `set` rule
 * replaces them. Frozen, every wave stands at its middle and the uptime at one hour, so that a test can name
 * each value. */
#include "mock.h"
#include <math.h>
#include <pthread.h>

static const double HOUR = 3600, PHASE_PER_GPU = 0.137;
static const double IDLE_WATTS = 90, WATTS_PER_PERCENT = 6, MEAN_WATTS = 390;
static double loaded_at; /* when the pretended driver was loaded: an hour before this library */

double uptime(void) {
    return options.frozen ? HOUR : seconds() - loaded_at;
}

/* From 0 to 1; period in seconds, phase in periods. */
double wave(int gpu, double period, double phase) {
    if (options.frozen)
        return 0.5;
    return 0.5 + 0.5 * sin((seconds() / period + phase + gpu * PHASE_PER_GPU) * 2 * M_PI);
}

/* A counter whose rate swings between 0 and twice `rate` a second: the integral, so it never goes back. */
double cumulated(int gpu, double rate, double period) {
    if (options.frozen)
        return rate * HOUR;
    double pulse = 2 * M_PI / period, at = uptime(), phase = gpu * PHASE_PER_GPU * 2 * M_PI;
    return rate * (at - (cos(pulse * at + phase) - cos(phase)) / pulse);
}

double utilization(int gpu) {
    return setting(gpu, "util", floor(100 * wave(gpu, 60, 0)));
}

double watts(int gpu) {
    return setting(gpu, "power", IDLE_WATTS + WATTS_PER_PERCENT * utilization(gpu));
}

u32 temperature(int gpu) {
    return (u32)setting(gpu, "temp", 34 + 40 * wave(gpu, 90, 0.9));
}

u32 clock_mhz(int gpu, enum ClockType type) {
    if (type == MEMORY_CLOCK)
        return (u32)setting(gpu, "memclock", 2619);
    double least = type == VIDEO_CLOCK ? 1140 : 345, range = type == VIDEO_CLOCK ? 400 : 1635;
    return (u32)(least + range * utilization(gpu) / 100);
}

u64 ecc_errors(int gpu, bool uncorrected, bool aggregate) {
    double since_reset = setting(gpu, uncorrected ? "ecc_dbe" : "ecc_sbe", 0);
    return (u64)since_reset * (aggregate ? 2 : 1);
}

u64 memory_total(int gpu) {
    return (u64)setting(gpu, "memtotal", options.model->memory / 1048576.0) << 20;
}

u64 memory_reserved(void) {
    return 479ULL << 20; /* what driver 590.48.01 reserves on an H100 */
}

u64 memory_of(const Processes *list) {
    u64 sum = 0;
    for (int i = 0; i < list->count; i++)
        if (list->process[i].memory != VALUE_NOT_AVAILABLE)
            sum += list->process[i].memory;
    return sum;
}

u64 memory_used(int gpu) {
    Processes compute = processes_of(gpu, COMPUTE), graphics = processes_of(gpu, GRAPHICS);
    u64 breathing_mib = (u64)(64 * wave(gpu, 45, 0.3));
    u64 used = memory_of(&compute) + memory_of(&graphics) + (breathing_mib << 20);
    double mib = setting(gpu, "memused", used / 1048576.0);
    double free_mib = setting(gpu, "free", -1);
    u64 available = options.model->memory - memory_reserved();
    u64 asked = free_mib < 0 ? (u64)(mib * 1048576) : available - (u64)(free_mib * 1048576);
    return asked > available ? available : asked; /* a steered amount cannot exceed the device */
}

/* Energy is the integral of the power that was served: the trapezoid between two looks, and at a change of
 * the rules the old power counts up to it and the new power from it on. */
static struct {
    double joules, at, watts;
} meters[MAX_GPUS];
static pthread_mutex_t metering = PTHREAD_MUTEX_INITIALIZER;

static void advance(int gpu) {
    double now = uptime(), draws = watts(gpu);
    meters[gpu].joules += (meters[gpu].watts + draws) / 2 * (now - meters[gpu].at);
    meters[gpu].at = now;
    meters[gpu].watts = draws;
}

void settle_energy(void) {
    pthread_mutex_lock(&metering);
    for (int gpu = 0; gpu < MAX_GPUS; gpu++)
        advance(gpu);
    pthread_mutex_unlock(&metering);
}

void restart_energy(void) {
    pthread_mutex_lock(&metering);
    for (int gpu = 0; gpu < MAX_GPUS; gpu++)
        meters[gpu].watts = watts(gpu);
    pthread_mutex_unlock(&metering);
}

u64 energy_mj(int gpu) {
    pthread_mutex_lock(&metering);
    advance(gpu);
    double joules = meters[gpu].joules;
    pthread_mutex_unlock(&metering);
    return (u64)setting(gpu, "energy", joules * 1000);
}

void start_clock(void) {
    loaded_at = seconds() - HOUR;
    for (int gpu = 0; gpu < MAX_GPUS; gpu++) {
        meters[gpu].joules = MEAN_WATTS * HOUR;
        meters[gpu].at = HOUR;
        meters[gpu].watts = watts(gpu);
    }
}
