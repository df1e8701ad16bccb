/* Device memory that processes share, for a machine without a GPU: preloaded, it counts the regions that TensorFlow's
 * BFC allocator takes from the system, and refuses those for which the device has no room left.
 *
 * The device is a file that all processes map: how large it is, what a process uses in addition to its pool (a context), and
 * what each process holds. SHARED_DEVICE names it; without it nothing is counted. The allocator asks by posix_memalign
 * from libtensorflow_framework.so; its regions are of 1 MiB and more, and smaller where it has been refused that. What
 * is below 64 KiB it gets: refused 2 KiB, BFCAllocator::Extend would ask for them again for ever.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SLOTS = 64, REGIONS = 256, REGION = 1 << 16, CALLERS = 256 };

typedef struct {
    int64_t pid;
    uint64_t held;
} Holder;

typedef struct {
    uint64_t size, context;
    uint64_t broken; /* not 0: every region is refused, whatever room there is */
    uint64_t refused; /* regions so far */
    Holder holder[SLOTS];
} Device;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static Device *device;
static int file = -1;
static pid_t owner; /* the process that has opened it: a forked child counts for itself */
static struct {
    char *start;
    uint64_t size;
} region[REGIONS];
static int regions;

static int opened(void) {
    if (device && owner == getpid()) return 1;
    const char *path = getenv("SHARED_DEVICE");
    if (!path) return 0;
    file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return 0;
    void *mapped = mmap(NULL, sizeof *device, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED) return 0;
    device = mapped;
    owner = getpid();
    regions = 0;
    return 1;
}

/* Find this process's place, and give that of ended processes back. */
static Holder *own(void) {
    Holder *found = NULL, *empty = NULL;
    for (int i = 0; i < SLOTS; i++) {
        Holder *each = &device->holder[i];
        if (each->pid && each->pid != owner && kill((pid_t)each->pid, 0) && errno == ESRCH) *each = (Holder){0, 0};
        if (each->pid == owner) found = each;
        if (!each->pid && !empty) empty = each;
    }
    if (!found && empty) {
        *empty = (Holder){owner, device->context};
        found = empty;
    }
    return found;
}

static uint64_t held_by_all(void) {
    uint64_t sum = 0;
    for (int i = 0; i < SLOTS; i++) sum += device->holder[i].held;
    return sum;
}

static int take(uint64_t size) {
    int taken = 0;
    flock(file, LOCK_EX);
    Holder *holder = own();
    if (holder && !device->broken && held_by_all() + size <= device->size) {
        holder->held += size;
        taken = 1;
    } else {
        device->refused++;
    }
    flock(file, LOCK_UN);
    return taken;
}

static void give(uint64_t size) {
    flock(file, LOCK_EX);
    own()->held -= size;
    flock(file, LOCK_UN);
}

/* Whether the caller is the allocator. dladdr searches TensorFlow's 100,000s of symbols, so the answer is kept by return
 * address: an entry is the address with the answer in its lowest bit, and a word is read and written whole. */
static int is_allocator(const void *caller) {
    static _Atomic uintptr_t known[CALLERS];
    uintptr_t address = (uintptr_t)caller;
    _Atomic uintptr_t *entry = &known[(address >> 2) % CALLERS];
    uintptr_t found = *entry;
    if (found >> 1 != address) {
        Dl_info info;
        int is = dladdr(caller, &info) && info.dli_fname && strstr(info.dli_fname, "libtensorflow_framework");
        *entry = found = address << 1 | (uintptr_t)is;
    }
    return (int)(found & 1);
}

static int counted(size_t size, const void *caller) {
    return size >= REGION && getenv("SHARED_DEVICE") && is_allocator(caller);
}

int posix_memalign(void **out, size_t alignment, size_t size) {
    static int (*next)(void **, size_t, size_t);
    if (!next) next = (int (*)(void **, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
    if (!counted(size, __builtin_return_address(0))) return next(out, alignment, size);
    pthread_mutex_lock(&mutex);
    int code = ENOMEM;
    if (opened() && regions < REGIONS && take(size)) {
        code = next(out, alignment, size);
        if (code) {
            give(size);
        } else {
            region[regions].start = *out;
            region[regions++].size = size;
        }
    }
    pthread_mutex_unlock(&mutex);
    return code;
}

void free(void *memory) {
    static void (*next)(void *);
    if (!next) next = (void (*)(void *))dlsym(RTLD_NEXT, "free");
    if (regions && memory && owner == getpid()) {
        pthread_mutex_lock(&mutex);
        for (int i = 0; i < regions; i++)
            if (region[i].start == memory) {
                give(region[i].size);
                region[i] = region[--regions];
                break;
            }
        pthread_mutex_unlock(&mutex);
    }
    next(memory);
}

/* For a process that is no framework's: hold so much more of the device; 0 where it has no room. */
int shared_device_take(uint64_t size) {
    pthread_mutex_lock(&mutex);
    int taken = opened() && take(size);
    pthread_mutex_unlock(&mutex);
    return taken;
}
