"""How long pages stay away before they are wanted again, and whether a pool should keep new ones for that.

Law: a page that is brought stands in the memory at most once, with the number that the clock of its account had then;
it leaves by being wanted again, by being brought again, or by another page that falls on its place. Distances are in
pages brought on one account; those beyond `REACH` times its size count as never.

Of all keys one in `SAMPLE` is looked at, by its checksum, so 8 bytes a slot remember eight times what the pool holds.
"""

from array import array
from zlib import crc32

__all__ = ["REACH", "SAMPLE", "ReuseDistances", "SeenPages"]

#: A page that was brought longer ago than this many pools of pages counts as new.
REACH = 8
SAMPLE = 8

#: While `selective`, this part of the new pages is kept all the same: what comes back much later than others is found
#: by that alone.
_KEPT_OF_NEW = 0.05
#: The part of the pool that known pages may fill: some pages are passing, others were wanted again.
_ROOM_FOR_KNOWN = 0.75

_CLOCK = 0xFFFFFFFF
_FADE = 0.98  # at each look, every half a pool: what was 17 pools ago counts half


class SeenPages:
    """A memory of sampled keys with room for `capacity` of them; later ones take the places of earlier ones."""

    def __init__(self, capacity: int) -> None:
        places = 1 << max(6, (capacity - 1).bit_length())
        self.mask = places - 1
        self.keys = array("I", bytes(4 * places))  # checksums; 0 is nobody
        self.times = array("I", bytes(4 * places))


class ReuseDistances:
    """What one account's pages teach: how many are wanted again within how many pages brought since.

    Keeping every new page for one turn of the pool gives hits(size) hits in `size` pages brought. Keeping one of n for
    n turns gives hits(n * size) / n. Where that is more, the pool is too small for what comes back, and new pages
    should make room for those that were seen before: then `selective` is true. Should those alone be more than fit for
    n turns, only a part of them is kept, too.
    """

    def __init__(self, seen: SeenPages, account: int = 0) -> None:
        self._seen = seen
        self._account = account
        self._clock = 0
        self._next_look = 0
        self._hits = [0.0] * 128
        self._pages = [0.0, 0.0]  # new and known ones, as judged
        self._allowance = [0.0, 0.0]  # of them, how many more may be kept
        self.selective = False
        self.kept_new = 1.0
        self.kept_known = 1.0

    def bring(self, key: bytes, size: int) -> bool | None:
        """Count a page that was brought to an account of `size` slots.

        Returns whether it is known to have been brought before; None if it is none of those that are looked at, and
        then `want_again` need not be called for it.
        """
        self._clock += 1
        if self._clock >= self._next_look:
            self._look(size)
        checksum = crc32(key, self._account)
        if checksum % SAMPLE:
            return None
        known = self._take_out(checksum, size)
        place = checksum // SAMPLE & self._seen.mask
        self._seen.keys[place] = checksum
        self._seen.times[place] = self._clock & _CLOCK
        return known

    def keeps(self, pages: int, known: bool) -> bool:
        """Judge pages of one prefix that were brought together: say whether to keep them, or to let them pass."""
        self._pages[known] += pages
        kept = self.kept_known if known else self.kept_new
        if kept == 1.0:
            return True
        self._allowance[known] += pages * kept
        if self._allowance[known] <= 0:
            return False
        self._allowance[known] -= pages
        return True

    def want_again(self, key: bytes, size: int) -> None:
        """Count the first time that a page is wanted after it was brought, from the pool."""
        self._take_out(crc32(key, self._account), size)

    def _take_out(self, checksum: int, size: int) -> bool:
        seen, place = self._seen, checksum // SAMPLE & self._seen.mask
        if seen.keys[place] != checksum or not checksum:
            return False
        seen.keys[place] = 0
        distance = self._clock - seen.times[place] & _CLOCK
        if distance > REACH * size:
            return False
        self._hits[_bucket(distance)] += 1
        return True

    def _look(self, size: int) -> None:
        """Choose between keeping all new pages and some; the first half pool is too early for that."""
        self._next_look = self._clock + max(16, size // 2)
        hits = best = 0.0
        best_reach = size
        for bucket, count in enumerate(self._hits):
            hits += count
            reach = _end(bucket)
            if reach > REACH * size:
                break
            if count and hits > best * max(reach, size):
                best, best_reach = hits / max(reach, size), max(reach, size)
            self._hits[bucket] = count * _FADE
        self.selective = best_reach > 1.25 * size  # less than a third of an octave says nothing
        known_for_that_long = best_reach * self._pages[1] / max(1.0, sum(self._pages))
        self.kept_new = _KEPT_OF_NEW if self.selective else 1.0
        self.kept_known = min(1.0, _ROOM_FOR_KNOWN * size / max(1.0, known_for_that_long)) if self.selective else 1.0
        self._pages = [pages * _FADE for pages in self._pages]


def _bucket(distance: int) -> int:
    """Return which quarter of an octave a distance is in."""
    if distance < 4:
        return distance
    octave = distance.bit_length() - 3
    return 4 * octave + (distance >> octave)


def _end(bucket: int) -> int:
    """Return the first distance behind a bucket."""
    if bucket < 4:
        return bucket + 1
    octave = bucket // 4 - 1
    return (bucket % 4 + 5) << octave
