/* The control file's grammar (README.md), line by line. */
#include "rules.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const SETTINGS[] = {
    "count",       "ecc_dbe",      "ecc_sbe",       "energy",    "free",        "limit",
    "memclock",    "memtotal",     "memused",       "mig_hides", "nvlink_data", "nvlink_down",
    "nvlink_errors", "nvlink_sum", "pcie_gen",      "pcie_replay", "pcie_width", "power",
    "pstate",      "recovery",     "remap_cor",     "remap_failed", "remap_pending", "remap_unc",
    "temp",        "throttle",     "util",
};

static bool parse_number(const char *text, double *out) {
    char *end;
    *out = strtod(text, &end);
    return end != text && !*end;
}

static bool parse_gpu(const char *text, int *out) {
    char *end;
    *out = text[0] == '*' ? NO_GPU : (int)strtol(text, &end, 10);
    return text[0] == '*' ? !text[1] : end != text && !*end && *out >= 0 && *out < MAX_GPUS;
}

static bool parse_function(const char *text, Rule *rule) {
    return snprintf(rule->function, sizeof rule->function, "%s", text) < (int)sizeof rule->function;
}

static bool parse_code(const char *text, double *out) {
    *out = code_named(text);
    return *out >= 0 || parse_number(text, out);
}

/* pid:MiB, pid:bytesB, or pid:na for memory unknown to the driver. */
static bool parse_process(char *text, Process *out) {
    char *end;
    out->pid = (u32)strtoul(text, &end, 10);
    if (end == text || *end != ':')
        return false;
    const char *memory = end + 1;
    out->memory = VALUE_NOT_AVAILABLE;
    if (!strcmp(memory, "na"))
        return true;
    u64 amount = strtoull(memory, &end, 10);
    out->memory = *end == 'B' ? amount : amount << 20;
    return end != memory && (!*end || !strcmp(end, "B"));
}

static bool parse_error(char **words, int count, Rule *rule) {
    rule->probability = 1;
    return parse_gpu(words[1], &rule->gpu) && parse_function(words[2], rule) &&
           parse_code(words[3], &rule->number) && (count < 5 || parse_number(words[4], &rule->probability));
}

static bool parse_delay(char **words, UNUSED int count, Rule *rule) {
    return parse_gpu(words[1], &rule->gpu) && parse_function(words[2], rule) &&
           parse_number(words[3], &rule->number);
}

static bool parse_hang(char **words, int count, Rule *rule) {
    return parse_gpu(words[1], &rule->gpu) && parse_function(count > 2 ? words[2] : "*", rule);
}

static bool parse_set(char **words, UNUSED int count, Rule *rule) {
    for (size_t i = 0; i < sizeof SETTINGS / sizeof *SETTINGS; i++)
        if (!strcmp(words[2], SETTINGS[i]))
            strcpy(rule->key, SETTINGS[i]);
    return rule->key[0] && parse_gpu(words[1], &rule->gpu) && parse_number(words[3], &rule->number);
}

static bool parse_processes(char **words, UNUSED int count, Rule *rule) {
    char *save;
    rule->process_kind = strcmp(words[0], "graphics") ? COMPUTE : GRAPHICS;
    if (!strcmp(words[2], "none"))
        return parse_gpu(words[1], &rule->gpu);
    for (char *word = strtok_r(words[2], ",", &save); word; word = strtok_r(NULL, ",", &save)) {
        Processes *list = &rule->processes;
        if (list->count == MAX_PROCESSES || !parse_process(word, &list->process[list->count++]))
            return false;
    }
    return parse_gpu(words[1], &rule->gpu);
}

static bool parse_xid(char **words, UNUSED int count, Rule *rule) {
    bool parsed = parse_gpu(words[2], &rule->gpu) && parse_number(words[3], &rule->number);
    rule->xid.sequence = strtoull(words[1], NULL, 10);
    rule->xid.gpu = rule->gpu;
    rule->xid.code = (u64)rule->number;
    return parsed && rule->xid.sequence && rule->gpu != NO_GPU;
}

static bool parse_binding(char **words, UNUSED int count, Rule *rule) {
    rule->xid.binding = strcmp(words[0], "bind") ? UNBOUND : BOUND;
    rule->xid.sequence = strtoull(words[1], NULL, 10);
    return parse_gpu(words[2], &rule->gpu) && rule->xid.sequence && (rule->xid.gpu = rule->gpu) != NO_GPU;
}

static bool parse_operational(char **words, int count, Rule *rule) {
    double numbers[6];
    for (int i = 0; i < 6; i++)
        if (!parse_number(words[4 + i], &numbers[i]))
            return false;
    rule->xid.operational = true;
    rule->xid.severity = (u32)numbers[0];
    rule->xid.category = (u32)numbers[1];
    rule->xid.attributes = (u32)numbers[2];
    rule->xid.group_attributes = (u32)numbers[3];
    rule->xid.group = (u64)numbers[4];
    rule->xid.timestamp_us = (u64)numbers[5];
    return parse_xid(words, count, rule);
}

static bool parse_driver(char **words, UNUSED int count, Rule *rule) {
    return parse_function(words[1], rule);
}

static bool parse_mig(char **words, int count, Rule *rule) {
    double generation = 0;
    bool parsed = parse_gpu(words[1], &rule->gpu) && parse_layout(words[2], &rule->layout) &&
                  (count < 4 || parse_number(words[3], &generation));
    rule->layout.generation = (int)generation;
    return parsed;
}

/* MiB, or bytesB, as of processes; "max" for no limit. */
static bool parse_amount(const char *text, u64 *out) {
    char *end;
    *out = strtoull(text, &end, 10);
    if (!strcmp(text, "max"))
        *out = ~0ULL;
    else if (end != text && !*end)
        *out <<= 20;
    else
        return end != text && !strcmp(end, "B");
    return true;
}

static bool parse_limits(char **words, UNUSED int count, Rule *rule) {
    MemoryLimits *limits = &rule->limits;
    return parse_gpu(words[1], &rule->gpu) && parse_function(words[2], rule) &&
           parse_amount(words[3], &limits->soft) && parse_amount(words[4], &limits->hard) &&
           parse_amount(words[5], &limits->used);
}

static const struct {
    const char *name;
    int kind, least, most; /* how many words the line may have */
    bool (*parse)(char **words, int count, Rule *rule);
} GRAMMAR[] = {
    {"error", ERROR, 4, 5, parse_error},
    {"delay", DELAY, 4, 4, parse_delay},
    {"hang", HANG, 2, 3, parse_hang},
    {"set", SET, 4, 4, parse_set},
    {"procs", PROCESSES, 3, 3, parse_processes},
    {"graphics", PROCESSES, 3, 3, parse_processes},
    {"xid", XID, 4, 4, parse_xid},
    {"bind", XID, 3, 3, parse_binding},
    {"unbind", XID, 3, 3, parse_binding},
    {"operational", XID, 10, 10, parse_operational},
    {"driver", DRIVER, 2, 2, parse_driver},
    {"mig", MIG, 3, 4, parse_mig},
    {"limits", LIMITS, 6, 6, parse_limits},
};

static bool parse_words(char **words, int count, Rule *rule) {
    for (size_t i = 0; i < sizeof GRAMMAR / sizeof *GRAMMAR; i++)
        if (!strcmp(words[0], GRAMMAR[i].name)) {
            *rule = (Rule){.kind = GRAMMAR[i].kind, .gpu = NO_GPU};
            return count >= GRAMMAR[i].least && count <= GRAMMAR[i].most &&
                   GRAMMAR[i].parse(words, count, rule);
        }
    return false;
}

bool parse_rule(const char *line, Rule *rule) {
    enum { MOST_WORDS = 11 };
    char *words[MOST_WORDS], *save, *text = strdup(line);
    text[strcspn(text, "#\n")] = '\0';
    int count = 0;
    for (char *word = strtok_r(text, " \t", &save); word && count < MOST_WORDS;
         word = strtok_r(NULL, " \t", &save))
        words[count++] = word;
    if (count && !parse_words(words, count, rule))
        refuse("bad control line", line);
    free(text);
    return count > 0;
}
