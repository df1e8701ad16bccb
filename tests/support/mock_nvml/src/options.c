/* The environment variables, read once when the library is loaded. */
#include "mock.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>
#include <unistd.h>

enum { H100, RTX4090, GB10 };
static const Model MODELS[] = {
    /* after recorded answers of an H100 SXM under driver 590.48.01 */
    [H100] =
        {
            .name = "NVIDIA H100 80GB HBM3",
            .datacenter = true,
            .memory = 81559ULL << 20,
            .bar1 = 128ULL << 30,
            .brand = 14,
            .architecture = 9,
            .compute_major = 9,
            .compute_minor = 0,
            .memory_bus_width = 5120,
            .pci_id = 0x233010DE,
            .pcie_generation = 5,
            .pcie_width = 16,
            .pcie_speed_mbps = 32000,
            .pcie_max_speed_code = 6,
            .nvlinks = 18,
            .limit_mw = 700000,
        },
    [RTX4090] =
        {
            .name = "NVIDIA GeForce RTX 4090",
            .memory = 24564ULL << 20,
            .bar1 = 32ULL << 30,
            .brand = 5,
            .architecture = 8,
            .compute_major = 8,
            .compute_minor = 9,
            .memory_bus_width = 384,
            .pci_id = 0x268410DE,
            .pcie_generation = 4,
            .pcie_width = 16,
            .pcie_speed_mbps = 16000,
            .pcie_max_speed_code = 5,
            .fans = 2,
            .limit_mw = 450000,
        },
    /* a GPU that shares the machine's memory and bears no power limit: as its owners describe it in
     * XuehaiPan/nvitop pull request 208, Syllo/nvtop issue 426 and leptonai/gpud pull request 1170 */
    [GB10] =
        {
            .name = "NVIDIA GB10",
            .brand = 14,
            .architecture = 10,
            .compute_major = 12,
            .compute_minor = 1,
            .pci_id = 0x2E1210DE,
            .pcie_generation = 1,
            .pcie_width = 1,
            .pcie_speed_mbps = 2500,
            .pcie_max_speed_code = 1,
        },
};

Options options = {.model = &MODELS[H100], .gpus = 8, .processes_per_gpu = 3, .driver = "590.48.01"};

enum { MAX_NAMED_DELAYS = 32 };
static struct {
    const char *function;
    double us;
} named_delays[MAX_NAMED_DELAYS];
static int named_delay_count;

void refuse(const char *what, const char *value) {
    fprintf(stderr, "mock nvml: %s: %s\n", what, value);
    _exit(EX_CONFIG); /* not abort(): no core file for a wrong line */
}

static long number(const char *variable, long otherwise, long least, long most) {
    const char *text = getenv(variable);
    if (!text)
        return otherwise;
    char *end;
    long value = strtol(text, &end, 10);
    if (end == text || *end || value < least || value > most)
        refuse(variable, text);
    return value;
}

/* The position of the variable's value among `choices` (which end with NULL); the first is the default. */
static int choice(const char *variable, const char *const *choices) {
    const char *text = getenv(variable);
    for (int i = 0; choices[i]; i++)
        if (!text || !strcmp(text, choices[i]))
            return i;
    refuse(variable, text);
}

static const char *text(const char *variable, const char *otherwise) {
    const char *value = getenv(variable);
    return value ? value : otherwise;
}

static void read_pids(void) {
    char *rest = strdup(text("MOCK_NVML_PIDS", "")), *save;
    for (char *word = strtok_r(rest, ",", &save); word; word = strtok_r(NULL, ",", &save)) {
        if (options.pid_count == MAX_PIDS || atoi(word) <= 0)
            refuse("MOCK_NVML_PIDS", word);
        options.pids[options.pid_count++] = atoi(word);
    }
    free(rest);
}

static void read_named_delays(void) {
    char *rest = strdup(text("MOCK_NVML_DELAYS", "")), *save; /* never freed: the names point into it */
    for (char *word = strtok_r(rest, ",", &save); word; word = strtok_r(NULL, ",", &save)) {
        char *value = strchr(word, '=');
        if (!value || named_delay_count == MAX_NAMED_DELAYS)
            refuse("MOCK_NVML_DELAYS", word);
        *value = '\0';
        named_delays[named_delay_count].function = word;
        named_delays[named_delay_count++].us = atof(value + 1);
    }
}

double named_delay_us(const char *function, double otherwise) {
    for (int i = 0; i < named_delay_count; i++)
        if (!strcmp(named_delays[i].function, function))
            return named_delays[i].us;
    return otherwise;
}

void read_options(void) {
    static const char *const models[] = {[H100] = "h100", [RTX4090] = "rtx4090", [GB10] = "gb10", NULL};
    static const char *const locks[] = {"none", "gpu", "global", NULL};
    static const char *const delay_modes[] = {"sleep", "spin", NULL};
    options.model = &MODELS[choice("MOCK_NVML_MODEL", models)];
    options.gpus = (int)number("MOCK_NVML_GPUS", options.gpus, 0, MAX_GPUS);
    int instances = (int)number("MOCK_NVML_MIG", 0, 0, MAX_MIG);
    options.layout = even_layout(options.model->datacenter ? instances : 0);
    options.processes_per_gpu =
        (int)number("MOCK_NVML_PROCS_PER_GPU", options.processes_per_gpu, 0, MAX_PROCESSES);
    options.delay_us = number("MOCK_NVML_DELAY_US", 0, 0, 60000000);
    options.field_delay_us = number("MOCK_NVML_FIELD_DELAY_US", 0, 0, 60000000);
    options.frozen = number("MOCK_NVML_FROZEN", 0, 0, 1);
    options.spin = choice("MOCK_NVML_DELAY_MODE", delay_modes);
    options.lock = choice("MOCK_NVML_LOCK", locks);
    options.driver = text("MOCK_NVML_DRIVER", options.driver);
    options.control = text("MOCK_NVML_CONTROL", NULL);
    options.counters = text("MOCK_NVML_COUNTERS", NULL);
    options.devices = text("MOCK_NVML_DEVICES", NULL);
    read_pids();
    read_named_delays();
}
