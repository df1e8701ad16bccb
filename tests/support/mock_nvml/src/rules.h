/* One line of a control file, parsed. */
#ifndef MOCK_NVML_RULES_H
#define MOCK_NVML_RULES_H

#include "mock.h"

typedef struct {
    enum { ERROR, DELAY, HANG, SET, PROCESSES, XID, MIG, DRIVER, LIMITS } kind;
    int gpu;           /* NO_GPU: any GPU, and calls that concern none */
    char function[128]; /* a trailing '*' matches any rest; of DRIVER the version, of LIMITS the cgroup */
    char key[24];
    double number;      /* the error code, the delay in microseconds, or the setting */
    double probability; /* of an error */
    Xid xid;
    enum ProcessKind process_kind;
    Processes processes;
    MigLayout layout;
    MemoryLimits limits;
} Rule;

/* False for a blank line; a line that is no rule ends the process with a message. */
bool parse_rule(const char *line, Rule *rule);

#endif
