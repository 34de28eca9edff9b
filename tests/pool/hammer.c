/* The example reader under the hammer: its own `copy`, called as fast as it goes, or stopped in the middle.
 *
 *     hammer once POOL MODEL COMPONENT SLOT KEY     as pool_reader, but halfway through the first shard it says "half"
 *                                                   and goes on when it is told a line
 *     hammer sweep POOL MODEL COMPONENT PAUSE_MS    reads every slot of the region again and again, with pauses, until
 *                                                   it is told a line; prints {"accepted", "stale", "wrong", "falls"}
 *
 * Sweeping, a page is right if each shard of it is the 32 bytes it begins with, over and over, and those begin with the
 * first 24 bytes of its key. "falls" counts generations that were seen lower than before. */
#include <string.h>
static void *copy_some(void *to, const void *from, unsigned long size);
#define memcpy copy_some
#define main reader_main
#include "pool_reader.c"
#undef memcpy
#undef main
#include <poll.h>

static int pausing;

static void await_line(void) {
    while (getchar() != '\n' && !feof(stdin)) continue;
}

static void *copy_some(void *to, const void *from, unsigned long size) {
    unsigned long half = pausing ? size / 2 : 0;
    memcpy(to, from, half);
    if (pausing) {
        pausing = 0;
        fputs("half\n", stderr);
        await_line();
    }
    memcpy((char *)to + half, (const char *)from + half, size - half);
    return to;
}

static int is_right(const struct region *region, const uint8_t *key, const char *page) {
    for (uint32_t shard = 0; shard < region->shards; shard++, page += region->bytes) {
        if (memcmp(page, key, 24)) return 0;
        if (memcmp(page, page + 32, region->bytes - 32)) return 0;
    }
    return 1;
}

static int sweep(const char *path, const char *model, const char *component, int pause_ms) {
    char *pool;
    const struct region *region = attach(path, model, component, &pool);
    if (!region) return 1;
    char *page = malloc(region->shards * region->bytes);
    uint64_t *seen = calloc(region->slots, sizeof *seen);
    unsigned long accepted = 0, stale = 0, wrong = 0, falls = 0;
    struct pollfd told = {.fd = 0, .events = POLLIN};
    puts("attached");
    fflush(stdout);
    for (uint64_t slot = 0;; slot = (slot + 1) % region->slots) {
        struct entry *entry = (struct entry *)(pool + region->table_offset) + slot;
        uint64_t generation = atomic_load(&entry->generation);
        falls += generation < seen[slot];
        seen[slot] = generation;
        uint8_t key[64];
        memcpy(key, entry->key, sizeof key);
        if (entry->state != RESIDENT) {
        } else if (copy(pool, region, slot, key, entry->key_len, page)) {
            stale++;
        } else if (is_right(region, key, page)) {
            accepted++;
        } else {
            wrong++;
        }
        if (slot == 0 && poll(&told, 1, pause_ms)) break;
    }
    return printf("{\"accepted\": %lu, \"stale\": %lu, \"wrong\": %lu, \"falls\": %lu}\n", accepted, stale, wrong, falls) < 0;
}

int main(int argc, char **argv) {
    if (argc == 6 && !strcmp(argv[1], "sweep")) return sweep(argv[2], argv[3], argv[4], atoi(argv[5]));
    pausing = 1;
    return reader_main(argc - 1, argv + 1);
}
