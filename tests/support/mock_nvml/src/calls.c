/* How every exported function begins: it is counted, follows the control file, may hang, waits out its delay,
 * and may fail by request. */
#include "mock.h"
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

/* The layout of the counters file, which processes share: mock_nvml/control.py reads it. */
enum { MAX_COUNTERS = 512, HANG_POLL_US = 20000 };
struct Counter {
    char name[56];
    _Atomic u64 calls;
};
_Static_assert(sizeof(Counter) == 64, "record of the counters file");

static Counter private_counters[MAX_COUNTERS], *counters = private_counters;
static int counters_file = -1;
static pthread_mutex_t naming = PTHREAD_MUTEX_INITIALIZER;

void open_counters(void) {
    if (!options.counters)
        return;
    counters_file = open(options.counters, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (counters_file < 0 || ftruncate(counters_file, sizeof private_counters))
        refuse("MOCK_NVML_COUNTERS", options.counters);
    counters = mmap(NULL, sizeof private_counters, PROT_READ | PROT_WRITE, MAP_SHARED, counters_file, 0);
    if (counters == MAP_FAILED)
        refuse("MOCK_NVML_COUNTERS", options.counters);
}

static Counter *counter_named(const char *function) {
    pthread_mutex_lock(&naming);   /* against threads */
    flock(counters_file, LOCK_EX); /* against processes that share the file; no file: nothing to lock */
    int i = 0;
    while (counters[i].name[0] && strcmp(counters[i].name, function))
        if (++i == MAX_COUNTERS)
            refuse("too many functions for the counters file", function);
    snprintf(counters[i].name, sizeof counters[i].name, "%s", function);
    flock(counters_file, LOCK_UN);
    pthread_mutex_unlock(&naming);
    return &counters[i];
}

static void count(Call *call, const char *function) {
    Counter *counter = atomic_load(call);
    if (!counter)
        atomic_store(call, counter = counter_named(function));
    atomic_fetch_add_explicit(&counter->calls, 1, memory_order_relaxed);
}

double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}

u64 wall_clock_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return now.tv_sec * 1000000ULL + now.tv_nsec / 1000;
}

void pause_us(double us) {
    static __thread bool precise;
    if (us <= 0)
        return;
    if (options.spin) {
        double end = seconds() + us * 1e-6;
        while (seconds() < end)
            ;
        return;
    }
    if (!precise)
        precise = !prctl(PR_SET_TIMERSLACK, 1000); /* the default slack of 50 us would double short delays */
    struct timespec left = {(time_t)(us / 1e6), (long)(fmod(us, 1e6) * 1000)};
    while (nanosleep(&left, &left) && errno == EINTR)
        ;
}

/* With MOCK_NVML_LOCK threads queue for their delays, as calls into a driver with one lock do. */
static void spend(double us, int gpu) {
    static pthread_mutex_t whole_driver = PTHREAD_MUTEX_INITIALIZER;
    static pthread_mutex_t per_gpu[MAX_GPUS] = {[0 ... MAX_GPUS - 1] = PTHREAD_MUTEX_INITIALIZER};
    pthread_mutex_t *mutex = NULL;
    if (us > 0 && options.lock == LOCK_GLOBAL)
        mutex = &whole_driver;
    else if (us > 0 && options.lock == LOCK_GPU && gpu != NO_GPU)
        mutex = &per_gpu[gpu];
    if (mutex)
        pthread_mutex_lock(mutex);
    pause_us(us);
    if (mutex)
        pthread_mutex_unlock(mutex);
}

static int suffer(const char *function, int gpu) {
    Verdict now = verdict(gpu, function);
    while (now.hangs) {
        pause_us(HANG_POLL_US);
        follow_control();
        now = verdict(gpu, function);
    }
    double usual = named_delay_us(function, gpu == NO_GPU ? 0 : options.delay_us);
    spend(now.delay_us < 0 ? usual : now.delay_us, gpu);
    return now.error;
}

int enter_before_init(Call *call, const char *function) {
    count(call, function);
    follow_control();
    return suffer(function, NO_GPU);
}

int enter_gpu(Call *call, const char *function, int gpu) {
    count(call, function);
    follow_control();
    if (!is_initialized())
        return UNINITIALIZED;
    TRY(suffer(function, gpu));
    return gpu == NO_GPU || is_listed(gpu) ? OK : GPU_IS_LOST;
}

int enter_system(Call *call, const char *function) {
    return enter_gpu(call, function, NO_GPU);
}

int enter_device(Call *call, const char *function, const Device *d) {
    REQUIRE(is_device(d));
    TRY(enter_gpu(call, function, d->gpu));
    REQUIRE(is_present(d));
    return OK;
}

int copy_text(char *to, u32 size, const char *text) {
    REQUIRE(to);
    if (strlen(text) + 1 > size)
        return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return OK;
}
