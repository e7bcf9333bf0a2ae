/* A libnvidia-ml.so.1 with three made-up GPUs: 0 counts its energy, 1 tells its power only, 2 is lost after the first
   question. Just the calls that services/energy/nvml.py makes, as the NVML API reference declares them. */
#include <stdio.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_LOADED = 9, LOST = 15 };
typedef struct gpu { int index; } *nvmlDevice_t;

static struct gpu gpus[3] = {{0}, {1}, {2}};
static int opened, asked[3];

int nvmlInitWithFlags(unsigned int flags) { (void)flags; opened++; return OK; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return opened-- > 0 ? OK : 1; }
const char *nvmlErrorString(int code) { return code == LOST ? "GPU is lost" : code == NOT_SUPPORTED ? "Not Supported" : "other"; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 3; return OK; }

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    if (index >= 3) return INVALID;
    *device = &gpus[index];
    return OK;
}

int nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length) {
    snprintf(uuid, length, "GPU-%d%d%d", device->index, device->index, device->index);
    return OK;
}

int nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length) {
    (void)device;
    snprintf(name, length, "Made Up");
    return OK;
}

int nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *millijoules) {
    if (device->index == 1) return NOT_SUPPORTED;
    if (device->index == 2 && asked[2]) return LOST;
    *millijoules = 5000000000000ULL + 1500ULL * asked[device->index]++;
    return OK;
}

int nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *milliwatts) {
    *milliwatts = 70250 + device->index;
    return OK;
}
