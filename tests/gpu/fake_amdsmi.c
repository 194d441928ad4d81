/* A stand-in for AMD's libamd_smi.so under the true amdsmi binding. FAKE_AMDSMI names a text file of lines of
 * tab-separated key=value pairs:
 *
 *   driver  init=34  hang=1
 *   gpu     serial=0x...  name=...  total_mib=196592  hip_id=0  hip_uuid=GPU-...  lost=10  memory=2
 *
 * init, lost and memory are amdsmi status codes; hip_id=-1 leaves the enumeration unsupported. The binding wants
 * every symbol of its release at import; the tests append a stub for each of the others.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum { OK = 0, NOT_SUPPORTED = 2 };

struct card {
  char serial[32], name[96], hip_uuid[64];
  uint64_t total_mib;
  int hip_id, lost, memory;
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

static struct card cards[16];
static uint32_t card_count;
static int init_code, hang;

static void set(struct card *card, const char *key, const char *value) {
  if (!strcmp(key, "serial")) snprintf(card->serial, sizeof card->serial, "%s", value);
  if (!strcmp(key, "name")) snprintf(card->name, sizeof card->name, "%s", value);
  if (!strcmp(key, "hip_uuid")) snprintf(card->hip_uuid, sizeof card->hip_uuid, "%s", value);
  if (!strcmp(key, "total_mib")) card->total_mib = strtoull(value, NULL, 10);
  if (!strcmp(key, "hip_id")) card->hip_id = atoi(value);
  if (!strcmp(key, "lost")) card->lost = atoi(value);
  if (!strcmp(key, "memory")) card->memory = atoi(value);
}

static void load(void) {
  const char *path = getenv("FAKE_AMDSMI");
  FILE *file = path ? fopen(path, "r") : NULL;
  char line[512];
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

EXPORT int amdsmi_init(uint64_t flags) {
  (void)flags;
  load();
  while (hang) pause();
  return init_code;
}

EXPORT int amdsmi_shut_down(void) { return OK; }

/* One socket for each card, as on real hosts. */
EXPORT int amdsmi_get_socket_handles(uint32_t *count, void **handles) {
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
  snprintf(info->market_name, sizeof info->market_name, "%s", card->name);
  snprintf(info->asic_serial, sizeof info->asic_serial, "%s", card->serial);
  return card->lost;
}

EXPORT int amdsmi_get_gpu_enumeration_info(struct card *card, struct enumeration_info *info) {
  info->hip_id = (uint32_t)card->hip_id;
  snprintf(info->hip_uuid, sizeof info->hip_uuid, "%s", card->hip_uuid);
  return card->hip_id < 0 ? NOT_SUPPORTED : OK;
}

EXPORT int amdsmi_get_gpu_memory_total(struct card *card, uint32_t type, uint64_t *total) {
  (void)type;
  *total = card->total_mib << 20;
  return card->memory;
}

EXPORT int amdsmi_get_gpu_device_bdf(struct card *card, uint64_t *bdf) {
  *bdf = (uint64_t)(card - cards + 3) << 8;
  return OK;
}
