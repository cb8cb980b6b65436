"""The group of a bin, and the grouping key of the group in Spark.

An instance is cut into parts (core/instance.py); inside Spark a part is a *group*: one call of the stateful processor
receives all its rows, its state is under one grouping key. Spark assigns groups to shuffle partitions by a hash of that
key, so with few groups some partitions would get several and others none. `group_ids` picks keys whose hashes are
spread evenly, whatever the number of partitions.
"""

from __future__ import annotations

from functools import lru_cache

SPREAD = 1680
"""Keys spread evenly over any number of partitions that divides this: 1 to 8, 10, 12, 14, 15, 16 and more.

Never change it: the keys are in every checkpoint.
"""


@lru_cache(maxsize=64)
def group_ids(groups: int) -> tuple[int, ...]:
    """The grouping key of each group: `ids[part]`. A function of the number alone, because keys outlive a query."""
    wanted = dict.fromkeys(range(groups), -1)
    candidate = 0
    while any(found < 0 for found in wanted.values()):
        part = murmur3(candidate) % SPREAD
        if wanted.get(part, 0) < 0:
            wanted[part] = candidate
        candidate += 1
    return tuple(wanted.values())


def murmur3(value: int) -> int:
    """Spark's hash of an integer column: Murmur3 of four bytes with seed 42, as a signed number."""
    k = (value * 0xCC9E2D51) & 0xFFFFFFFF
    k = ((k << 15 | k >> 17) * 0x1B873593) & 0xFFFFFFFF
    h = 42 ^ k
    h = ((h << 13 | h >> 19) * 5 + 0xE6546B64) & 0xFFFFFFFF
    h ^= 4
    h = ((h ^ h >> 16) * 0x85EBCA6B) & 0xFFFFFFFF
    h = ((h ^ h >> 13) * 0xC2B2AE35) & 0xFFFFFFFF
    h ^= h >> 16
    return h - (1 << 32) if h >> 31 else h
