/* hashtable.py's lookup: the same hash, the same buckets, without an array per step. */
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

/* The row of each wanted key of one pool, or FIND_EMPTY. `mask` is the number of buckets less one. Row r's key is
 * keys[4 r .. 4 r + 4). Ends because the table always has an empty bucket. */
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

#endif
