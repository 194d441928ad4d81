/* A stand-in for NVIDIA's libnvidia-ml.so.1, small enough to read in one go, so that tests can drive the real
 * binding without a card. FAKE_NVML names a text file of lines of tab-separated key=value pairs, in this order:
 *
 *   driver  init=9  hang=init|memory  crash=1  count=1
 *   gpu     uuid=GPU-...  name=...  total_mib=81559  lost=1  memory=3  mig=1
 *           used_mib=2048  util=37  memutil=5  samples=0/95/0  memsamples=1/2  temp=41  milliwatts=70000
 *           millijoules=9  kb=1000  reasons=8  ecc=0  recovery=1  recovery_code=3
 *           pids=PID:MIB;PID:MIB  procs=PID:PERCENT;...  fail=util:3;samples:13  hang=util
 *           slow_ms=600  nvlink=1/2
 *           event=SEQUENCE:TYPE:DATA:GPU_INSTANCE
 *   mig     uuid=MIG-...  name=...  total_mib=9856  instance=1  (belongs to the gpu line before it; uuid= is a hole)
 *
 * init, memory and the numbers of fail are NVML return codes; nvlink are the cards that NVLink joins with this one,
 * counted from 0; everything may be left out. The names in fail and hang are those given to `enter` below; `all`
 * means every one of them; a hang leaves the file FAKE_NVML.hung. The file is read again when it has been replaced; an
 * event is delivered when its sequence number has grown since the subscription. OLD_DRIVER leaves out what drivers of
 * some years ago did not have.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MIG_SLOTS 7
#define ROWS 16

enum {
  OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMED_OUT = 10, LOST = 15
};

enum { P2P_NVLINK = 2, P2P_OK = 0, P2P_NOT_SUPPORTED = 5 };

struct pair { unsigned key, value; };

struct device {
  char uuid[96], name[96], fail[256], hang[32];
  unsigned long long total_mib, used_mib, millijoules, ecc, reasons, event_type, event_data;
  unsigned util, memutil, temp, milliwatts, kb, recovery, samples[2][ROWS], pid_count, proc_count, sequence;
  unsigned instance, event_instance;
  int lost, memory, mig, slots, recovery_code, slow_ms, sample_count[2];
  struct pair pids[ROWS], procs[ROWS];
  unsigned peers[ROWS];
  int peer_count;
  struct device *slot[MIG_SLOTS], *card;
  /* These outlive a new script. */
  unsigned long long subscribed;
  unsigned delivered;
};

struct sample { unsigned long long at; union { unsigned number; double fraction; } value; };
struct process_sample { unsigned pid; unsigned long long at; unsigned sm, memory, encoder, decoder; };
struct process { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
struct field { unsigned id, scope; long long at, latency; unsigned type; int code; unsigned long long value; };
struct event { struct device *device; unsigned long long type, data; unsigned gpu_instance, compute_instance; };

static struct device gpus[16], instances[64];
static unsigned gpu_count, instance_count;
static int init_code, crash, listed = -1;
static char hang[16];
static struct stat script;

/* Leaves a file that tells the test, and never comes back. */
static void stay(void) {
  char marker[512];
  snprintf(marker, sizeof marker, "%s.hung", getenv("FAKE_NVML"));
  fclose(fopen(marker, "w"));
  for (;;) pause();
}

static void hang_if(const char *where) {
  if (strcmp(hang, where) == 0) stay();
}

static unsigned pairs(struct pair *rows, const char *text) {
  unsigned count = 0;
  while (*text && count < ROWS) {
    rows[count].key = strtoul(text, (char **)&text, 10);
    rows[count++].value = *text == ':' ? strtoul(text + 1, (char **)&text, 10) : 0;
    text += *text == ';';
  }
  return count;
}

static int numbers(unsigned *rows, const char *text) {
  int count = 0;
  while (*text && count < ROWS) {
    rows[count++] = strtoul(text, (char **)&text, 10);
    text += *text == '/';
  }
  return count;
}

static void set(struct device *device, const char *key, const char *value) {
  unsigned long long number = strtoull(value, NULL, 0);
  if (!strcmp(key, "uuid")) snprintf(device->uuid, sizeof device->uuid, "%s", value);
  if (!strcmp(key, "name")) snprintf(device->name, sizeof device->name, "%s", value);
  if (!strcmp(key, "fail")) snprintf(device->fail, sizeof device->fail, ";%s;", value);
  if (!strcmp(key, "hang")) snprintf(device->hang, sizeof device->hang, "%s", value);
  if (!strcmp(key, "total_mib")) device->total_mib = number;
  if (!strcmp(key, "used_mib")) device->used_mib = number;
  if (!strcmp(key, "slow_ms")) device->slow_ms = atoi(value);
  if (!strcmp(key, "lost")) device->lost = atoi(value);
  if (!strcmp(key, "memory")) device->memory = atoi(value);
  if (!strcmp(key, "mig")) device->mig = atoi(value);
  if (!strcmp(key, "util")) device->util = number;
  if (!strcmp(key, "memutil")) device->memutil = number;
  if (!strcmp(key, "temp")) device->temp = number;
  if (!strcmp(key, "milliwatts")) device->milliwatts = number;
  if (!strcmp(key, "millijoules")) device->millijoules = number;
  if (!strcmp(key, "kb")) device->kb = number;
  if (!strcmp(key, "reasons")) device->reasons = number;
  if (!strcmp(key, "ecc")) device->ecc = number;
  if (!strcmp(key, "instance")) device->instance = number;
  if (!strcmp(key, "recovery")) device->recovery = number;
  if (!strcmp(key, "recovery_code")) device->recovery_code = atoi(value);
  if (!strcmp(key, "samples")) device->sample_count[0] = numbers(device->samples[0], value);
  if (!strcmp(key, "memsamples")) device->sample_count[1] = numbers(device->samples[1], value);
  if (!strcmp(key, "nvlink")) device->peer_count = numbers(device->peers, value);
  if (!strcmp(key, "pids")) device->pid_count = pairs(device->pids, value);
  if (!strcmp(key, "procs")) device->proc_count = pairs(device->procs, value);
  if (!strcmp(key, "event")) {
    device->event_instance = ~0u;
    sscanf(value, "%u:%llu:%llu:%u", &device->sequence, &device->event_type, &device->event_data,
           &device->event_instance);
  }
}

static void clear(struct device *device) {
  unsigned long long subscribed = device->subscribed;
  unsigned delivered = device->delivered;
  memset(device, 0, sizeof *device);
  device->subscribed = subscribed;
  device->delivered = delivered;
}

static void load(void) {
  const char *path = getenv("FAKE_NVML");
  FILE *file = path ? fopen(path, "r") : NULL;
  char line[1024];
  gpu_count = instance_count = 0;
  listed = -1;
  for (unsigned i = 0; i < 16; i++) clear(&gpus[i]);
  for (unsigned i = 0; i < 64; i++) clear(&instances[i]);
  while (file && fgets(line, sizeof line, file)) {
    struct device *device = NULL;
    char *kind = strtok(line, "\t\n"), *pair;
    if (kind && !strcmp(kind, "gpu")) device = &gpus[gpu_count++];
    if (kind && !strcmp(kind, "mig")) {
      struct device *card = &gpus[gpu_count - 1];
      device = card->slot[card->slots++] = &instances[instance_count++];
      device->card = card;
    }
    while ((pair = strtok(NULL, "\t\n"))) {
      char *value = strchr(pair, '=');
      *value++ = 0;
      if (device) set(device, pair, value);
      else if (!strcmp(pair, "init")) init_code = atoi(value);
      else if (!strcmp(pair, "crash")) crash = atoi(value);
      else if (!strcmp(pair, "count")) listed = atoi(value);
      else if (!strcmp(pair, "hang")) snprintf(hang, sizeof hang, "%s", value);
    }
  }
  if (file) fclose(file);
}

static void refresh(void) {
  struct stat now;
  if (stat(getenv("FAKE_NVML"), &now) || (now.st_ino == script.st_ino && now.st_mtim.tv_sec == script.st_mtim.tv_sec
                                          && now.st_mtim.tv_nsec == script.st_mtim.tv_nsec))
    return;
  script = now;
  load();
}

/* Every call for a device begins here: the script says whether it hangs, fails, or goes on. */
static int enter(struct device *device, const char *call) {
  char wanted[40], *found;
  refresh();
  fputs("chatter ", stdout);
  fflush(stdout);
  if (!strcmp(device->hang, call)) stay();
  if (device->slow_ms) usleep(1000 * device->slow_ms);
  snprintf(wanted, sizeof wanted, ";%s:", call);
  if (!(found = strstr(device->fail, wanted))) found = strstr(device->fail, ";all:");
  if (found) return atoi(strchr(found, ':') + 1);
  return device->lost ? LOST : OK;
}

#define ENTER(device, call) do { int code = enter(device, call); if (code) return code; } while (0)

static unsigned long long now_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return now.tv_sec * 1000000ull + now.tv_nsec / 1000;
}

EXPORT int nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  refresh();
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
  refresh();
  *count = listed < 0 ? gpu_count : (unsigned)listed;
  return OK;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **handle) {
  if (index >= gpu_count) return INVALID;
  *handle = &gpus[index];
  return enter(*handle, "handle");
}

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, struct device **handle) {
  refresh();
  *handle = NULL;
  for (unsigned i = 0; i < gpu_count; i++)
    if (!strcmp(gpus[i].uuid, uuid)) *handle = &gpus[i];
  for (unsigned i = 0; i < instance_count; i++)
    if (!strcmp(instances[i].uuid, uuid)) *handle = &instances[i];
  if (!*handle) return NOT_FOUND;
  ENTER(*handle, "uuid");
  return enter(*handle, "handle");
}

EXPORT int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(struct device *instance, struct device **card) {
  *card = instance->card;
  return *card ? OK : INVALID;
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
  ENTER(device, "memory");
  out[0] = device->total_mib << 20;
  out[1] = (device->total_mib - device->used_mib) << 20;
  out[2] = device->used_mib << 20;
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

EXPORT int nvmlDeviceGetP2PStatus(struct device *device, struct device *other, unsigned capability, unsigned *status) {
  ENTER(device, "p2p");
  *status = P2P_NOT_SUPPORTED;
  for (int i = 0; i < device->peer_count; i++)
    if (capability == P2P_NVLINK && other == &gpus[device->peers[i]]) *status = P2P_OK;
  return OK;
}

EXPORT int nvmlDeviceGetUtilizationRates(struct device *device, unsigned out[2]) {
  ENTER(device, "util");
  out[0] = device->util;
  out[1] = device->memutil;
  return OK;
}

EXPORT int nvmlDeviceGetProcessUtilization(struct device *device, struct process_sample *rows, unsigned *count,
                                           unsigned long long since) {
  ENTER(device, "procs");
  (void)since;
  if (!device->proc_count) return NOT_FOUND;
  unsigned room = rows ? *count : 0;
  *count = device->proc_count;
  if (room < device->proc_count) return INSUFFICIENT_SIZE;
  for (unsigned i = 0; i < device->proc_count; i++)
    rows[i] = (struct process_sample){device->procs[i].key, now_us(), device->procs[i].value, 0, 0, 0};
  return OK;
}

static int processes(struct device *device, unsigned *count, struct process *rows) {
  ENTER(device, "pids");
  unsigned room = rows ? *count : 0;
  *count = device->pid_count;
  if (room < device->pid_count) return INSUFFICIENT_SIZE;
  for (unsigned i = 0; i < device->pid_count; i++)
    rows[i] = (struct process){device->pids[i].key, (unsigned long long)device->pids[i].value << 20, 0, 0};
  return OK;
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v2(struct device *device, unsigned *count, struct process *rows) {
  return processes(device, count, rows);
}

EXPORT int nvmlDeviceGetPcieThroughput(struct device *device, unsigned counter, unsigned *kb) {
  ENTER(device, "pcie");
  *kb = counter ? 2 * device->kb : device->kb;
  return OK;
}

EXPORT int nvmlDeviceGetPowerUsage(struct device *device, unsigned *milliwatts) {
  ENTER(device, "power");
  *milliwatts = device->milliwatts;
  return OK;
}

EXPORT int nvmlDeviceGetTemperature(struct device *device, unsigned sensor, unsigned *degrees) {
  ENTER(device, "temp");
  (void)sensor;
  *degrees = device->temp;
  return OK;
}

EXPORT int nvmlDeviceGetTotalEccErrors(struct device *device, unsigned type, unsigned counter,
                                       unsigned long long *count) {
  ENTER(device, "ecc");
  *count = type == 1 && counter == 0 ? device->ecc : 0;
  return OK;
}

/* Only for an instance: where MIG is on, the driver does not tell it of the card. */
EXPORT int nvmlDeviceGetMemoryErrorCounter(struct device *device, unsigned type, unsigned counter, unsigned where,
                                           unsigned long long *count) {
  ENTER(device, "ecc");
  if (!device->card) return NOT_SUPPORTED;
  *count = type == 1 && counter == 0 && where == 7 ? device->ecc : 0;
  return OK;
}

EXPORT int nvmlDeviceGetGpuInstanceId(struct device *device, unsigned *instance) {
  ENTER(device, "instance");
  *instance = device->instance;
  return OK;
}

static int clock_reasons(struct device *device, unsigned long long *reasons) {
  ENTER(device, "reasons");
  *reasons = device->reasons;
  return OK;
}

#ifdef OLD_DRIVER
EXPORT int nvmlDeviceGetCurrentClocksThrottleReasons(struct device *device, unsigned long long *reasons) {
  return clock_reasons(device, reasons);
}
#else
EXPORT int nvmlDeviceGetCurrentClocksEventReasons(struct device *device, unsigned long long *reasons) {
  return clock_reasons(device, reasons);
}

EXPORT int nvmlDeviceGetMemoryInfo_v2(struct device *device, struct memory_v2 *out) {
  hang_if("memory");
  ENTER(device, "memory");
  out->total = device->total_mib << 20;
  out->reserved = 600ull << 20;
  out->used = device->used_mib << 20;
  out->free = out->total - out->reserved - out->used;
  return device->memory;
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(struct device *device, unsigned *count, struct process *rows) {
  return processes(device, count, rows);
}

EXPORT int nvmlDeviceGetTotalEnergyConsumption(struct device *device, unsigned long long *millijoules) {
  ENTER(device, "energy");
  *millijoules = device->millijoules;
  return OK;
}

/* Buffered samples are a millisecond apart, the last of them is new. */
EXPORT int nvmlDeviceGetSamples(struct device *device, unsigned kind, unsigned long long since, unsigned *type,
                                unsigned *count, struct sample *rows) {
  ENTER(device, "samples");
  (void)since;
  int row = kind - 1;
  if (row > 1 || !device->sample_count[row]) return NOT_FOUND;
  *type = 1;
  *count = device->sample_count[row];
  if (rows)
    for (int i = 0; i < device->sample_count[row]; i++) {
      rows[i].at = now_us() - 1000ull * (device->sample_count[row] - 1 - i);
      rows[i].value.number = device->samples[row][i];
    }
  return OK;
}

EXPORT int nvmlDeviceGetFieldValues(struct device *device, int count, struct field *rows) {
  ENTER(device, "fields");
  for (int i = 0; i < count; i++) {
    rows[i].code = rows[i].id == 230 ? device->recovery_code : NOT_SUPPORTED;
    rows[i].value = device->recovery;
  }
  return OK;
}

EXPORT int nvmlEventSetCreate(void **set) {
  *set = gpus;
  return OK;
}

EXPORT int nvmlDeviceGetSupportedEventTypes(struct device *device, unsigned long long *types) {
  ENTER(device, "events");
  *types = ~0ull;
  return OK;
}

EXPORT int nvmlDeviceRegisterEvents(struct device *device, unsigned long long types, void *set) {
  ENTER(device, "events");
  device->subscribed |= types;
  device->delivered = device->sequence;
  return set == gpus ? OK : INVALID;
}

EXPORT int nvmlEventSetWait_v2(void *set, struct event *out, unsigned timeout_ms) {
  unsigned long long until = now_us() + timeout_ms * 1000ull;
  if (set != gpus) return INVALID;
  do {
    refresh();
    for (unsigned i = 0; i < gpu_count; i++) {
      struct device *device = &gpus[i];
      if (!strcmp(device->hang, "wait")) stay();
      if (device->sequence <= device->delivered || !(device->event_type & device->subscribed)) continue;
      device->delivered = device->sequence;
      *out = (struct event){device, device->event_type, device->event_data, device->event_instance, ~0u};
      return OK;
    }
    usleep(20000);
  } while (now_us() < until);
  return TIMED_OUT;
}
#endif
