/* A stand-in for AMD's libamd_smi.so under the true amdsmi binding. FAKE_AMDSMI names a text file of lines of
 * tab-separated key=value pairs:
 *
 *   driver  init=34  hang=1
 *   gpu     serial=0x...  name=...  total_mib=196592  hip_id=0  hip_uuid=GPU-...  lost=10  memory=2
 *           gfx=55  umc=20  used_mib=512  steps=1000  watts=150  celsius=45  megabits=8  ecc=0  prochot=1
 *           hive=7
 *           pids=PID:ENGINE_MS;PID:ENGINE_MS  fail=activity:2;vram:7  hang=activity  event=SEQUENCE:TYPE
 *
 * init, lost, memory and the numbers of fail are amdsmi status codes; hip_id=-1 leaves the enumeration
 * unsupported. The names in fail and hang are those given to `enter` below; `all` means every one of them. A
 * process holds 64 MiB. gfx=65535 and watts=65535 are what the library writes for "N/A". The file is read again
 * when it has been replaced; an event is delivered when its sequence number has grown since the subscription.
 * The binding wants every symbol of its release at import; the tests append a stub for each of the others.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define ROWS 16

enum { OK = 0, NOT_SUPPORTED = 2, NO_DATA = 40 };

struct pair { unsigned key, value; };

struct card {
  char serial[32], name[96], hip_uuid[64], fail[256], hang[32];
  uint64_t total_mib, steps, ecc, hive;
  uint32_t gfx, umc, used_mib, watts, celsius, megabits, prochot, pid_count, sequence, event_type;
  int hip_id, lost, memory;
  struct pair pids[ROWS];
  /* These outlive a new script. */
  uint64_t subscribed;
  uint32_t delivered;
};

struct asic_info {
  char market_name[256];
  uint32_t vendor_id;
  char vendor_name[256];
  uint32_t subvendor_id;
  uint64_t device_id;
  uint32_t rev_id;
  char asic_serial[256];
  uint32_t oam_id, num_of_compute_units;
  uint64_t target_graphics_version;
  uint32_t subsystem_id, reserved[21];
};

struct enumeration_info {
  uint32_t drm_render, drm_card, hsa_id, hip_id;
  char hip_uuid[256];
};

struct engine_usage { uint32_t gfx, umc, mm, reserved[13]; };
struct vram_usage { uint32_t total, used, reserved[2]; };
struct error_count { uint64_t correctable, uncorrectable, deferred, reserved[5]; };
struct power_info {
  uint64_t socket;
  uint32_t current, average;
  uint64_t gfx_voltage, soc_voltage, mem_voltage;
  uint32_t limit;
  uint64_t reserved[18];
};
struct pcie_info {
  struct { uint16_t width; uint32_t speed, version, slot, max_version; uint64_t reserved[9]; } fixed;
  struct {
    uint16_t width;
    uint32_t speed, bandwidth;
    uint64_t replays, recoveries, roll_overs, naks_sent, naks_received;
    uint32_t other_end;
    uint64_t reserved[12];
  } metric;
  uint64_t reserved[32];
};
struct violations {
  uint64_t accumulated[9], percent[6];
  uint8_t prochot, ppt, socket, vr, hbm, clock;
  uint64_t rest[736];
};
struct process {
  char name[256];
  uint32_t pid;
  uint64_t mem, gfx, enc;
  uint32_t reserved1[12];
  uint64_t gtt, cpu, vram;
  uint32_t reserved2[10];
  char container[256];
  uint32_t occupancy, reserved3[11];
};
struct xgmi_info { uint8_t lanes; uint64_t hive, node; uint32_t index, reserved[9]; };
struct notice { void *card; uint32_t type; char message[256]; };

/* The binding passes its own structures: the fixture skips where the installed release's have other sizes. */
_Static_assert(sizeof(struct asic_info) == 896 && sizeof(struct enumeration_info) == 272, "layout");
_Static_assert(sizeof(struct engine_usage) == 64 && sizeof(struct vram_usage) == 16, "layout");
_Static_assert(sizeof(struct error_count) == 64 && sizeof(struct power_info) == 192, "layout");
_Static_assert(sizeof(struct pcie_info) == 512 && sizeof(struct violations) == 6016, "layout");
_Static_assert(sizeof(struct process) == 704 && sizeof(struct notice) == 272, "layout");
_Static_assert(sizeof(struct xgmi_info) == 64, "layout");

static struct card cards[16];
static uint32_t card_count;
static int init_code, hang;
static struct stat script;

static void set(struct card *card, const char *key, const char *value) {
  unsigned long long number = strtoull(value, NULL, 10);
  if (!strcmp(key, "serial")) snprintf(card->serial, sizeof card->serial, "%s", value);
  if (!strcmp(key, "name")) snprintf(card->name, sizeof card->name, "%s", value);
  if (!strcmp(key, "hip_uuid")) snprintf(card->hip_uuid, sizeof card->hip_uuid, "%s", value);
  if (!strcmp(key, "fail")) snprintf(card->fail, sizeof card->fail, ";%s;", value);
  if (!strcmp(key, "hang")) snprintf(card->hang, sizeof card->hang, "%s", value);
  if (!strcmp(key, "total_mib")) card->total_mib = number;
  if (!strcmp(key, "hip_id")) card->hip_id = atoi(value);
  if (!strcmp(key, "lost")) card->lost = atoi(value);
  if (!strcmp(key, "memory")) card->memory = atoi(value);
  if (!strcmp(key, "gfx")) card->gfx = number;
  if (!strcmp(key, "umc")) card->umc = number;
  if (!strcmp(key, "used_mib")) card->used_mib = number;
  if (!strcmp(key, "steps")) card->steps = number;
  if (!strcmp(key, "watts")) card->watts = number;
  if (!strcmp(key, "celsius")) card->celsius = number;
  if (!strcmp(key, "megabits")) card->megabits = number;
  if (!strcmp(key, "ecc")) card->ecc = number;
  if (!strcmp(key, "hive")) card->hive = number;
  if (!strcmp(key, "prochot")) card->prochot = number;
  if (!strcmp(key, "event")) sscanf(value, "%u:%u", &card->sequence, &card->event_type);
  if (!strcmp(key, "pids"))
    while (*value && card->pid_count < ROWS) {
      struct pair *row = &card->pids[card->pid_count++];
      row->key = strtoul(value, (char **)&value, 10);
      row->value = *value == ':' ? strtoul(value + 1, (char **)&value, 10) : 0;
      value += *value == ';';
    }
}

static void load(void) {
  const char *path = getenv("FAKE_AMDSMI");
  struct stat now;
  if (!path || stat(path, &now) || (now.st_ino == script.st_ino && now.st_mtim.tv_sec == script.st_mtim.tv_sec
                                    && now.st_mtim.tv_nsec == script.st_mtim.tv_nsec))
    return;
  script = now;
  FILE *file = fopen(path, "r");
  char line[1024];
  card_count = 0;
  for (unsigned i = 0; i < 16; i++) {
    struct card kept = cards[i];
    memset(&cards[i], 0, sizeof cards[i]);
    cards[i].subscribed = kept.subscribed;
    cards[i].delivered = kept.delivered;
  }
  while (file && fgets(line, sizeof line, file)) {
    char *kind = strtok(line, "\t\n"), *pair;
    struct card *card = kind && !strcmp(kind, "gpu") ? &cards[card_count++] : NULL;
    while ((pair = strtok(NULL, "\t\n"))) {
      char *value = strchr(pair, '=');
      *value++ = 0;
      if (card) set(card, pair, value);
      else if (!strcmp(pair, "init")) init_code = atoi(value);
      else if (!strcmp(pair, "hang")) hang = atoi(value);
    }
  }
  if (file) fclose(file);
}

/* Every call for a card begins here: the script says whether it hangs, fails, or goes on. */
static int enter(struct card *card, const char *call) {
  char wanted[40], *found;
  load();
  while (!strcmp(card->hang, call)) pause();
  snprintf(wanted, sizeof wanted, ";%s:", call);
  if (!(found = strstr(card->fail, wanted))) found = strstr(card->fail, ";all:");
  return found ? atoi(strchr(found, ':') + 1) : OK;
}

#define ENTER(card, call) do { int code = enter(card, call); if (code) return code; } while (0)

EXPORT int amdsmi_init(uint64_t flags) {
  (void)flags;
  load();
  while (hang) pause();
  return init_code;
}

EXPORT int amdsmi_shut_down(void) { return OK; }

/* One socket for each card, as on real hosts. */
EXPORT int amdsmi_get_socket_handles(uint32_t *count, void **handles) {
  load();
  if (handles)
    for (uint32_t i = 0; i < *count; i++) handles[i] = &cards[i];
  *count = card_count;
  return OK;
}

EXPORT int amdsmi_get_processor_handles(void *socket, uint32_t *count, void **handles) {
  if (handles) handles[0] = socket;
  *count = 1;
  return OK;
}

EXPORT int amdsmi_get_gpu_asic_info(struct card *card, struct asic_info *info) {
  ENTER(card, "asic");
  snprintf(info->market_name, sizeof info->market_name, "%s", card->name);
  snprintf(info->asic_serial, sizeof info->asic_serial, "%s", card->serial);
  return card->lost;
}

EXPORT int amdsmi_get_gpu_enumeration_info(struct card *card, struct enumeration_info *info) {
  ENTER(card, "enumeration");
  info->hip_id = (uint32_t)card->hip_id;
  snprintf(info->hip_uuid, sizeof info->hip_uuid, "%s", card->hip_uuid);
  return card->hip_id < 0 ? NOT_SUPPORTED : OK;
}

EXPORT int amdsmi_get_gpu_memory_total(struct card *card, uint32_t type, uint64_t *total) {
  (void)type;
  ENTER(card, "total");
  *total = card->total_mib << 20;
  return card->memory;
}

EXPORT int amdsmi_get_gpu_device_bdf(struct card *card, uint64_t *bdf) {
  *bdf = (uint64_t)(card - cards + 3) << 8;
  return OK;
}

EXPORT int amdsmi_get_xgmi_info(struct card *card, struct xgmi_info *info) {
  ENTER(card, "xgmi");
  info->hive = card->hive;
  return OK;
}

EXPORT int amdsmi_get_gpu_activity(struct card *card, struct engine_usage *usage) {
  ENTER(card, "activity");
  usage->gfx = card->gfx;
  usage->umc = card->umc;
  usage->mm = 0xFFFF;
  return OK;
}

EXPORT int amdsmi_get_gpu_vram_usage(struct card *card, struct vram_usage *usage) {
  ENTER(card, "vram");
  usage->total = card->total_mib;
  usage->used = card->used_mib;
  return OK;
}

EXPORT int amdsmi_get_gpu_process_list(struct card *card, uint32_t *count, struct process *rows) {
  ENTER(card, "processes");
  for (uint32_t i = 0; i < card->pid_count; i++) {
    rows[i].pid = card->pids[i].key;
    rows[i].mem = 64 << 20;
    rows[i].gfx = card->pids[i].value * 1000000ull;
  }
  *count = card->pid_count;
  return OK;
}

EXPORT int amdsmi_get_gpu_total_ecc_count(struct card *card, struct error_count *count) {
  ENTER(card, "ecc");
  count->uncorrectable = card->ecc;
  return OK;
}

EXPORT int amdsmi_get_energy_count(struct card *card, uint64_t *steps, float *resolution, uint64_t *at) {
  ENTER(card, "energy");
  *steps = card->steps;
  *resolution = 15.5f;
  *at = 0;
  return OK;
}

EXPORT int amdsmi_get_power_info(struct card *card, struct power_info *info) {
  ENTER(card, "power");
  info->current = 0xFFFF;
  info->average = card->watts;
  return OK;
}

EXPORT int amdsmi_get_temp_metric(struct card *card, uint32_t sensor, uint32_t metric, int64_t *celsius) {
  ENTER(card, sensor == 0 ? "edge" : "hotspot");
  (void)metric;
  *celsius = card->celsius;
  return OK;
}

EXPORT int amdsmi_get_pcie_info(struct card *card, struct pcie_info *info) {
  ENTER(card, "pcie");
  info->metric.bandwidth = card->megabits;
  return OK;
}

EXPORT int amdsmi_get_violation_status(struct card *card, struct violations *flags) {
  ENTER(card, "violations");
  flags->prochot = card->prochot;
  flags->ppt = 1;
  return OK;
}

EXPORT int amdsmi_init_gpu_event_notification(struct card *card) {
  ENTER(card, "events");
  card->delivered = card->sequence;
  return OK;
}

EXPORT int amdsmi_set_gpu_event_notification_mask(struct card *card, uint64_t mask) {
  card->subscribed = mask;
  return OK;
}

EXPORT int amdsmi_get_gpu_event_notification(int timeout_ms, uint32_t *count, struct notice *rows) {
  for (int waited = 0; waited < timeout_ms; waited += 20) {
    load();
    for (uint32_t i = 0; i < card_count; i++) {
      struct card *card = &cards[i];
      if (card->sequence <= card->delivered || !(card->subscribed >> (card->event_type - 1) & 1)) continue;
      card->delivered = card->sequence;
      rows[0].card = card;
      rows[0].type = card->event_type;
      *count = 1;
      return OK;
    }
    usleep(20000);
  }
  *count = 0;
  return NO_DATA;
}
