/* One line of a control file, parsed. */
#ifndef MOCK_NVML_RULES_H
#define MOCK_NVML_RULES_H

#include "mock.h"

typedef struct {
    enum { ERROR, DELAY, HANG, SET, PROCESSES, XID, MIG, DRIVER } kind;
    int gpu;           /* NO_GPU: any GPU, and calls that concern none */
    char function[64]; /* a trailing '*' matches any rest; of DRIVER the version */
    char key[24];
    double number;      /* the error code, the delay in microseconds, or the setting */
    double probability; /* of an error */
    Xid xid;
    enum ProcessKind process_kind;
    Processes processes;
    MigLayout layout;
} Rule;

/* False for a blank line; a line that is no rule ends the process with a message. */
bool parse_rule(const char *line, Rule *rule);

#endif
