/* Lookup and insertion of hashtable.py, with the same hash and buckets, but without an array per probe. */
#ifndef KVTIER_FIND_H
#define KVTIER_FIND_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define FIND_EMPTY -1

static uint64_t find_hash(const uint64_t *key, uint16_t pool) {
    uint64_t mixed = key[0] * 0x9E3779B185EBCA87ULL + key[1] * 0xC2B2AE3D27D4EB4FULL + key[2] * 0x165667B19E3779F9ULL +
                     key[3] * 0x85EBCA77C2B2AE63ULL + pool * 0x27D4EB2F165667C5ULL;
    mixed ^= mixed >> 32;
    mixed *= 0x9E3779B185EBCA87ULL;
    mixed ^= mixed >> 32;
    return mixed >> 1;
}

/* The row of each wanted key in one pool, or FIND_EMPTY. `mask`: number of buckets minus one. Row r's key is keys[4 r .. 4 r
 * + 4). The loop ends because the table always has an empty bucket. */
static void find_rows(const int32_t *buckets, size_t mask, const uint64_t *keys, const uint16_t *pools, size_t table_rows,
                      const uint64_t *wanted, size_t count, uint16_t pool, int64_t *rows) {
    for (size_t i = 0; i < count; i++, wanted += 4) {
        size_t at = find_hash(wanted, pool) & mask;
        rows[i] = FIND_EMPTY;
        for (int32_t row; (row = buckets[at]) != FIND_EMPTY; at = (at + 1) & mask) {
            if (row < 0 || (size_t)row >= table_rows || pools[row] != pool) continue;
            if (memcmp(keys + 4 * (size_t)row, wanted, 32)) continue;
            rows[i] = row;
            break;
        }
    }
}

/* Inserts rows whose keys are not in the table. There must be enough empty buckets. */
static void place_rows(int32_t *buckets, size_t mask, const uint64_t *keys, const uint16_t *pools, const int64_t *rows,
                       size_t count) {
    enum { AHEAD = 32 };
    size_t at[AHEAD];
    for (size_t i = 0; i < count; i += AHEAD) {
        size_t now = count - i < AHEAD ? count - i : AHEAD;
        /* The buckets are scattered over memory: prefetching several at once hides the latency. */
        for (size_t k = 0; k < now; k++) {
            at[k] = find_hash(keys + 4 * rows[i + k], pools[rows[i + k]]) & mask;
            __builtin_prefetch(buckets + at[k], 1);
        }
        for (size_t k = 0; k < now; k++) {
            while (buckets[at[k]] != FIND_EMPTY) at[k] = (at[k] + 1) & mask;
            buckets[at[k]] = (int32_t)rows[i + k];
        }
    }
}

#endif
