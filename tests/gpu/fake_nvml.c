/* A stand-in for NVIDIA's libnvidia-ml.so.1, small enough to read in one go, so that tests can drive the real
 * binding without a card. FAKE_NVML names a text file of lines of tab-separated key=value pairs, in this order:
 *
 *   driver  init=9  hang=init|memory  crash=1
 *   gpu     uuid=GPU-...  name=...  total_mib=81559  lost=1  memory=3  mig=1
 *   mig     uuid=MIG-...  name=...  total_mib=9856          (belongs to the gpu line before it; uuid= is a hole)
 *
 * init and memory are NVML return codes; everything may be left out.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MIG_SLOTS 7

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, LOST = 15 };

struct device {
  char uuid[96], name[96];
  unsigned long long total_mib;
  int lost, memory, mig, slots;
  struct device *slot[MIG_SLOTS];
};

static struct device gpus[16], instances[64];
static unsigned gpu_count, instance_count;
static int init_code, crash;
static char hang[16];

static void hang_if(const char *where) {
  while (strcmp(hang, where) == 0) pause();
}

static void set(struct device *device, const char *key, const char *value) {
  if (!strcmp(key, "uuid")) snprintf(device->uuid, sizeof device->uuid, "%s", value);
  if (!strcmp(key, "name")) snprintf(device->name, sizeof device->name, "%s", value);
  if (!strcmp(key, "total_mib")) device->total_mib = strtoull(value, NULL, 10);
  if (!strcmp(key, "lost")) device->lost = atoi(value);
  if (!strcmp(key, "memory")) device->memory = atoi(value);
  if (!strcmp(key, "mig")) device->mig = atoi(value);
}

static void load(void) {
  const char *path = getenv("FAKE_NVML");
  FILE *file = path ? fopen(path, "r") : NULL;
  char line[512];
  gpu_count = instance_count = 0;
  while (file && fgets(line, sizeof line, file)) {
    struct device *device = NULL;
    char *kind = strtok(line, "\t\n"), *pair;
    if (kind && !strcmp(kind, "gpu")) device = &gpus[gpu_count++];
    if (kind && !strcmp(kind, "mig")) {
      struct device *card = &gpus[gpu_count - 1];
      device = card->slot[card->slots++] = &instances[instance_count++];
    }
    while ((pair = strtok(NULL, "\t\n"))) {
      char *value = strchr(pair, '=');
      *value++ = 0;
      if (device) set(device, pair, value);
      else if (!strcmp(pair, "init")) init_code = atoi(value);
      else if (!strcmp(pair, "crash")) crash = atoi(value);
      else if (!strcmp(pair, "hang")) snprintf(hang, sizeof hang, "%s", value);
    }
  }
  if (file) fclose(file);
}

EXPORT int nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  load();
  puts("a driver library that chatters on stdout");
  fflush(stdout);
  hang_if("init");
  if (crash) raise(SIGSEGV);
  return init_code;
}

EXPORT int nvmlShutdown(void) { return OK; }

EXPORT const char *nvmlErrorString(int code) {
  static char message[32];
  snprintf(message, sizeof message, "fake error %d", code);
  return message;
}

EXPORT int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = gpu_count;
  return OK;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **handle) {
  if (index >= gpu_count) return INVALID;
  *handle = &gpus[index];
  return gpus[index].lost ? LOST : OK;
}

EXPORT int nvmlDeviceGetUUID(struct device *device, char *out, unsigned size) {
  snprintf(out, size, "%s", device->uuid);
  return OK;
}

EXPORT int nvmlDeviceGetName(struct device *device, char *out, unsigned size) {
  snprintf(out, size, "%s", device->name);
  return OK;
}

EXPORT int nvmlDeviceGetMemoryInfo(struct device *device, unsigned long long out[3]) {
  hang_if("memory");
  out[0] = out[1] = device->total_mib << 20;
  out[2] = 0;
  return device->memory;
}

EXPORT int nvmlDeviceGetMigMode(struct device *device, unsigned *current, unsigned *pending) {
  *current = *pending = device->mig == 1;
  return device->mig < 0 ? NOT_SUPPORTED : OK;
}

EXPORT int nvmlDeviceGetMaxMigDeviceCount(struct device *device, unsigned *count) {
  (void)device;
  *count = MIG_SLOTS;
  return OK;
}

EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(struct device *card, unsigned index, struct device **handle) {
  if (index >= (unsigned)card->slots || !card->slot[index]->uuid[0]) return NOT_FOUND;
  *handle = card->slot[index];
  return OK;
}
