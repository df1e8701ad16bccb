/* Preloaded into a process: its wall clock runs as many nanoseconds ahead as the file CLOCK_STEP_FILE says, 8 bytes that
 * the test may change at any time. The monotonic clock is left alone, as by a real step. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static _Atomic int64_t *step;

__attribute__((constructor)) static void map_file(void) {
    int file = open(getenv("CLOCK_STEP_FILE"), O_RDONLY | O_CLOEXEC);
    step = mmap(NULL, sizeof *step, PROT_READ, MAP_SHARED, file, 0);
    if (file < 0 || step == MAP_FAILED)
        abort();
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real)
        real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (!result && step && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t ns = now->tv_sec * 1000000000LL + now->tv_nsec + *step;
        *now = (struct timespec){ns / 1000000000LL, ns % 1000000000LL};
    }
    return result;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out)
        *out = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval *out, void *zone) {
    (void)zone;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    *out = (struct timeval){now.tv_sec, now.tv_nsec / 1000};
    return 0;
}
