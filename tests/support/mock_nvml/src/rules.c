/* The rules in force. Every call looks whether the control file changed before it answers, so a test that has
 * rewritten the file knows that each call begun afterwards follows the new rules. */
#include "rules.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

typedef struct {
    int count;
    Rule rule[];
} Rules;

enum { KEPT = 64 };

static _Atomic(Rules *) current;
static Rules *kept[KEPT]; /* a ring of those in force lately, the current ones among them */
static struct stat loaded;
static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;

static Rules *in_force(void) {
    static Rules none;
    Rules *rules = atomic_load(&current);
    return rules ? rules : &none;
}

static Rules *read_rules(FILE *file) {
    Rules *rules = calloc(1, sizeof *rules);
    char *line = NULL;
    size_t size = 0;
    Rule rule;
    while (file && getline(&line, &size, file) >= 0)
        if (parse_rule(line, &rule)) {
            rules = realloc(rules, sizeof *rules + (rules->count + 1) * sizeof rule);
            rules->rule[rules->count++] = rule;
        }
    free(line);
    return rules;
}

static bool same_file(const struct stat *a, const struct stat *b) {
    return a->st_ino == b->st_ino && a->st_size == b->st_size && a->st_mtim.tv_sec == b->st_mtim.tv_sec &&
           a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

/* A call may still be reading rules that were just replaced, but never those of 64 changes ago: it reads them again
 * each time it wants to know something. Without an end to them a test of memory would measure the mock. */
static void put_in_force(Rules *rules) {
    static unsigned changes;
    unsigned oldest = changes++ % KEPT;
    atomic_store(&current, rules);
    free(kept[oldest]);
    kept[oldest] = rules;
}

void follow_control(void) {
    if (!options.control)
        return;
    pthread_mutex_lock(&loading);
    struct stat found;
    if (stat(options.control, &found))
        found = (struct stat){0}; /* no file: no rules */
    if (!same_file(&found, &loaded)) {
        FILE *file = fopen(options.control, "r");
        Rules *rules = read_rules(file);
        if (file)
            fclose(file);
        settle_energy();
        put_in_force(rules);
        restart_energy();
        loaded = found;
    }
    pthread_mutex_unlock(&loading);
}

static bool concerns(const Rule *rule, int gpu) {
    return rule->gpu == NO_GPU || rule->gpu == gpu;
}

static bool names(const Rule *rule, const char *function) {
    size_t length = strlen(rule->function);
    if (length && rule->function[length - 1] == '*')
        return !strncmp(rule->function, function, length - 1);
    return !strcmp(rule->function, function);
}

double setting(int gpu, const char *key, double otherwise) {
    Rules *rules = in_force();
    for (int i = rules->count - 1; i >= 0; i--) { /* the last one wins */
        const Rule *rule = &rules->rule[i];
        if (rule->kind == SET && concerns(rule, gpu) && !strcmp(rule->key, key))
            return rule->number;
    }
    return otherwise;
}

const char *driver_version(void) {
    Rules *rules = in_force();
    for (int i = rules->count - 1; i >= 0; i--)
        if (rules->rule[i].kind == DRIVER)
            return rules->rule[i].function;
    return options.driver;
}

Verdict verdict(int gpu, const char *function) {
    Verdict out = {.delay_us = -1, .error = OK};
    Rules *rules = in_force();
    for (int i = 0; i < rules->count; i++) {
        const Rule *rule = &rules->rule[i];
        if (!concerns(rule, gpu) || !names(rule, function))
            continue;
        if (rule->kind == HANG)
            out.hangs = true;
        else if (rule->kind == DELAY)
            out.delay_us = rule->number;
        else if (rule->kind == ERROR && random() < rule->probability * ((double)RAND_MAX + 1))
            out.error = (int)rule->number;
    }
    return out;
}

static Processes dealt_from_environment(int gpu) {
    Processes out = {.count = 0};
    for (int i = 0; i < options.processes_per_gpu && options.pid_count; i++) {
        int dealt = (gpu * options.processes_per_gpu + i) % options.pid_count;
        out.process[out.count++] = (Process){(u32)options.pids[dealt], (1024ULL + 512 * i) << 20};
    }
    return out;
}

Processes processes_of(int gpu, enum ProcessKind kind) {
    Rules *rules = in_force();
    for (int i = rules->count - 1; i >= 0; i--) {
        const Rule *rule = &rules->rule[i];
        if (rule->kind == PROCESSES && rule->process_kind == kind && concerns(rule, gpu))
            return rule->processes;
    }
    return kind == COMPUTE ? dealt_from_environment(gpu) : (Processes){.count = 0};
}

const MigLayout *declared_layout(int gpu) {
    Rules *rules = in_force();
    for (int i = rules->count - 1; i >= 0; i--)
        if (rules->rule[i].kind == MIG && concerns(&rules->rule[i], gpu))
            return &rules->rule[i].layout;
    return NULL;
}

const MemoryLimits *memory_limits_of(int gpu, const char *cgroup) {
    Rules *rules = in_force();
    for (int i = rules->count - 1; i >= 0; i--) {
        const Rule *rule = &rules->rule[i];
        if (rule->kind == LIMITS && concerns(rule, gpu) && (!cgroup || !strcmp(rule->function, cgroup)))
            return &rule->limits;
    }
    return NULL;
}

bool is_bound(int gpu, u64 *since) {
    Rules *rules = in_force();
    bool bound = true;
    *since = 0;
    for (int i = 0; i < rules->count; i++) {
        const Rule *rule = &rules->rule[i];
        if (rule->kind == XID && rule->xid.binding && rule->gpu == gpu && rule->xid.sequence > *since) {
            *since = rule->xid.sequence;
            bound = rule->xid.binding == BOUND;
        }
    }
    return bound;
}

u64 latest_xid(void) {
    Rules *rules = in_force();
    u64 latest = 0;
    for (int i = 0; i < rules->count; i++)
        if (rules->rule[i].kind == XID && rules->rule[i].xid.sequence > latest)
            latest = rules->rule[i].xid.sequence;
    return latest;
}

bool next_xid(u64 after, bool (*wanted)(const void *listener, const Xid *xid), const void *listener, Xid *out) {
    Rules *rules = in_force();
    const Xid *next = NULL;
    for (int i = 0; i < rules->count; i++) {
        const Xid *xid = &rules->rule[i].xid;
        bool earliest = !next || xid->sequence < next->sequence;
        if (rules->rule[i].kind == XID && xid->sequence > after && earliest && wanted(listener, xid))
            next = xid;
    }
    if (next)
        *out = *next;
    return next != NULL;
}
