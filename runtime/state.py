"""State beside the blocks: sequence slots, and snapshots of windows in host memory with a disk behind them.

A slot holds a sequence's window rings on the device. A snapshot is the window state of the encoder half at the end of a named block; it
spares a later prompt the replay. Snapshots are checked against what was stored; a damaged one counts as absent. docs/runtime.md, 2.4.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tapeout.runtime.disk import DiskTier


class SlotPool:
    """Sequence slots 0 to count - 1. Taking and giving back are exact: a slot that is free cannot be given back again."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = deque(range(count))
        self._is_free = [True] * count
        self._asked: set[int] = set()  # that were taken by number

    def __len__(self) -> int:
        """Free slots."""
        return len(self._free)

    def __contains__(self, slot: object) -> bool:
        """Says whether `slot` is a slot and free."""
        return isinstance(slot, int) and 0 <= slot < self.count and self._is_free[slot]

    def take(self, slot: int | None = None) -> int:
        """A free slot, the one that has been free longest, or the one asked for."""
        if slot is None:
            slot = self._free.popleft()
        else:
            self._free.remove(slot)
            self._asked.add(slot)
        self._is_free[slot] = False
        return slot

    def give(self, slot: int) -> None:
        """Takes a slot back."""
        if self._is_free[slot]:
            raise RuntimeError(f"internal: slot {slot} is given back twice")
        self._is_free[slot] = True
        self._asked.discard(slot)
        self._free.append(slot)

    def give_others(self) -> None:
        """Takes back all but those that were asked for by number: no sequence has one any more."""
        if len(self._free) + len(self._asked) < self.count:
            self._is_free = [slot not in self._asked for slot in range(self.count)]
            self._free = deque(slot for slot in range(self.count) if self._is_free[slot])


class Snapshot(NamedTuple):
    """Window state that ends at a block boundary; `lineage` as for blocks."""

    payload: bytes
    lineage: int | None
    session: str = ""


@dataclass(slots=True)
class _Kept:
    snapshot: Snapshot
    digest: bytes
    until_s: float


class SnapshotStore:
    """Snapshots by block name, the least recently used leaving first; what leaves goes to disk if there is one.

    `budget_bytes` bounds host memory, `keep_s` how long one stays without use.
    """

    def __init__(self, budget_bytes: int, keep_s: float, clock: Callable[[], float], disk: "DiskTier | None" = None) -> None:
        self.budget_bytes, self.keep_s, self.disk = budget_bytes, keep_s, disk
        self.bytes = self.stored = self.evicted = self.damaged = self.expired = 0
        self._clock = clock
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: bytes) -> bool:
        kept = self._kept.get(key)
        if kept is not None and kept.until_s >= self._clock():
            return True
        return self.disk is not None and self.disk.has("snapshot", key)

    def last_of(self, keys: Sequence[bytes], count: int) -> int:
        """How many of the first `count` names there are up to the last one that is kept; 0 if none is. Looked at for every prompt that waits."""
        now, kept, disk = self._clock(), self._kept, self.disk
        for number in range(count, 0, -1):
            found = kept.get(keys[number - 1])
            if (found is not None and found.until_s >= now) or (disk is not None and disk.has("snapshot", keys[number - 1])):
                return number
        return 0

    def put(self, key: bytes, snapshot: Snapshot) -> None:
        """Keeps a snapshot, unless it is larger than the whole budget; an older one of the name gives way."""
        self._remove(key)
        if len(snapshot.payload) > self.budget_bytes:
            return
        self._kept[key] = _Kept(snapshot, _digest(snapshot.payload), self._clock() + self.keep_s)
        self.bytes += len(snapshot.payload)
        self.stored += 1
        while self.bytes > self.budget_bytes:
            oldest = next(iter(self._kept))
            self._to_disk(oldest)
            self._remove(oldest)
            self.evicted += 1

    def flush(self) -> None:
        """Writes what is in memory to disk, if there is one: the next engine finds it there."""
        for key in list(self._kept):
            self._to_disk(key)

    def _to_disk(self, key: bytes) -> None:
        """Writes what is still what was stored: on disk it gets a digest of its own."""
        snapshot = self._kept[key].snapshot
        if self.disk is not None and self._is_whole(key):
            self.disk.put("snapshot", key, snapshot.payload, snapshot.lineage, snapshot.session)

    def drop(self, key: bytes) -> None:
        """Forgets a snapshot in memory. Nothing happens for one that is not there."""
        self._remove(key)

    def get(self, key: bytes) -> Snapshot | None:
        """The snapshot of this name, if it is there, fresh and undamaged."""
        kept = self._kept.get(key)
        if kept is None:
            return self._from_disk(key)
        if kept.until_s < self._clock():
            self._remove(key)
            self.expired += 1
            return None
        if not self._is_whole(key):
            return None
        self._kept.move_to_end(key)
        kept.until_s = self._clock() + self.keep_s
        return kept.snapshot

    def _is_whole(self, key: bytes) -> bool:
        """Says whether a snapshot is what was stored; one that is not is removed and counted."""
        kept = self._kept[key]
        if _digest(kept.snapshot.payload) == kept.digest:
            return True
        self._remove(key)
        self.damaged += 1
        return False

    def _from_disk(self, key: bytes) -> Snapshot | None:
        found = None if self.disk is None else self.disk.get("snapshot", key)
        return None if found is None else Snapshot(found.payload, found.lineage, found.session)

    def _remove(self, key: bytes) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self.bytes -= len(kept.snapshot.payload)


def _digest(payload: bytes) -> bytes:
    return blake2b(payload, digest_size=16).digest()
