/* Copy one page out of Forestage's shared pool, whole or not at all (docs/pool-format.md). C11, little-endian Linux.
 *
 *     cc -std=c11 -O2 -o pool_reader pool_reader.c
 *     ./pool_reader /dev/shm/forestage/pool demo kv 7 8a2c58...e1 >page
 *
 * Slot and key are those of a prefetch's answer. Exit status 0: the page is on standard output. 3, stale: the slot does
 * not hold that page (any more), ask the service anew. 1: no such pool, region or slot. 2: wrong usage. */
#define _POSIX_C_SOURCE 200809L
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

enum { VERSION = 3, STARTING = 1, RESIDENT = 2, STALE = 3 };
struct header {
    char magic[8];
    uint32_t version, header_bytes;
    uint64_t file_bytes;
    uint32_t regions, others[33], state;
};
struct region {
    char model[128], component[32], fingerprint[32];
    uint64_t table_offset, offset, slot_bytes, slots, shard_bytes, bytes;
    uint32_t shards, others[3];
};
struct entry {
    _Atomic uint64_t generation;
    uint8_t state, key_len, others[22], key[64], reserved[32];
};

/* Map the pool and find a region of it. The mapping stays valid, whatever becomes of the service and of the file. */
static const struct region *attach(const char *path, const char *model, const char *component, char **pool) {
    struct stat status;
    int fd = open(path, O_RDONLY);
    if (fd < 0 || fstat(fd, &status) || status.st_size < (off_t)sizeof(struct header)) return NULL;
    *pool = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_SHARED, fd, 0);
    const struct header *header = (void *)*pool;
    if (*pool == MAP_FAILED || memcmp(header->magic, "FRSTPOOL", 8) || header->version != VERSION) return NULL;
    if (header->file_bytes != (uint64_t)status.st_size || header->state == STARTING) return NULL;
    const struct region *region = (void *)(*pool + header->header_bytes);
    for (const struct region *end = region + header->regions; region < end; region++)
        if (!strncmp(region->model, model, 128) && !strncmp(region->component, component, 32)) return region;
    return NULL;
}

/* Copy the shards of a slot to `page`, one after another; STALE unless they were the key's during the whole copy. */
static int copy(const char *pool, const struct region *region, uint64_t slot, const uint8_t *key, size_t key_len,
                char *page) {
    struct entry *entry = (struct entry *)(pool + region->table_offset) + slot;
    const char *shard = pool + region->offset + slot * region->slot_bytes;
    uint64_t before = atomic_load_explicit(&entry->generation, memory_order_acquire);
    if (before & 1 || entry->state != RESIDENT || entry->key_len != key_len || memcmp(entry->key, key, key_len))
        return STALE;
    for (uint32_t i = 0; i < region->shards; i++, shard += region->shard_bytes)
        memcpy(page + i * region->bytes, shard, region->bytes);
    atomic_thread_fence(memory_order_acquire); /* the whole copy comes before the second look */
    return atomic_load_explicit(&entry->generation, memory_order_relaxed) == before ? 0 : STALE;
}

int main(int argc, char **argv) {
    uint8_t key[64];
    size_t key_len = argc == 6 && strlen(argv[5]) <= 2 * sizeof key ? strlen(argv[5]) / 2 : 0;
    for (size_t i = 0; i < key_len; i++)
        if (sscanf(argv[5] + 2 * i, "%2hhx", &key[i]) != 1) key_len = 0;
    if (!key_len) return fputs("usage: pool_reader POOL MODEL COMPONENT SLOT KEY >PAGE\n", stderr), 2;
    char *pool, *page;
    const struct region *region = attach(argv[1], argv[2], argv[3], &pool);
    uint64_t slot = strtoull(argv[4], NULL, 10);
    if (!region || slot >= region->slots || !(page = malloc(region->shards * region->bytes)))
        return fputs("pool_reader: no such pool, region or slot\n", stderr), 1;
    if (copy(pool, region, slot, key, key_len, page)) return fputs("pool_reader: stale\n", stderr), STALE;
    return fwrite(page, region->bytes, region->shards, stdout) != region->shards || fflush(stdout);
}
