"""A4: memory under random events, all rules of docs/runtime.md, 2.1, after each; state slots, snapshots and the disk tier."""

import os
import random
from pathlib import Path

import numpy as np
import pytest

from tapeout.runtime.blocks import BlockPool, Named
from tapeout.runtime.disk import SUFFIX, DiskTier
from tapeout.runtime.errors import CacheFolderRefused
from tapeout.runtime.state import SlotPool, Snapshot, SnapshotStore

BLOCK, BLOCKS, SLOTS, WIDTH = 4, 40, 6, 16


class Model:
    """Random sequences on a pool, with the plain facts beside it: tokens in the cache and promised, by slot."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pool = BlockPool(BLOCKS, BLOCK, np.zeros((SLOTS, WIDTH), np.int32))
        self.slots = SlotPool(SLOTS)
        self.tokens: dict[int, int] = {}
        self.wanted: dict[int, int] = {}
        self.keys: dict[int, list[bytes]] = {}

    def event(self) -> str:
        chosen = self.rng.choice(["add", "chunk", "chunk", "decode", "decode", "name", "drop", "fork"])
        getattr(self, chosen)()
        return chosen

    def add(self) -> None:
        """A prompt that shares the leading blocks of some earlier text, promised in whole."""
        if not len(self.slots):
            return
        keys = [bytes([self.rng.randrange(3)]) + i.to_bytes(15, "big") for i in range(self.rng.randint(0, 6))]
        shared = []
        for key in keys:
            found = self.pool.named(key)
            if found is None or found[1].key != key:
                break
            shared.append(found[0])
        length = len(shared) * BLOCK + self.rng.randint(1, 30)
        needed = self.pool.blocks_for(length) - len(shared) + sum(map(self.pool.is_cached, shared))
        if length > WIDTH * BLOCK or needed > self.pool.unpromised_blocks:
            return
        slot = self.slots.take()
        self.pool.adopt(slot, shared)
        self.pool.promise(slot, length)
        self.tokens[slot], self.wanted[slot], self.keys[slot] = len(shared) * BLOCK, length, keys

    def chunk(self) -> None:
        for slot in self._some():
            more = min(self.wanted[slot], self.tokens[slot] + self.rng.randint(1, 9))
            self.pool.reserve(slot, more)
            self.tokens[slot] = max(self.tokens[slot], more)

    def decode(self) -> None:
        """Up to six more tokens, if the ledger has a block for them."""
        for slot in self._some():
            more = min(self.tokens[slot] + self.rng.randint(1, 6), WIDTH * BLOCK)
            if self.tokens[slot] < self.wanted[slot] or self.pool.blocks_for(more) - self.pool.held_count(slot) > self.pool.unpromised_blocks:
                continue
            self.pool.reserve(slot, more)
            self.tokens[slot] = more

    def name(self) -> None:
        for slot in self._some():
            full = self.tokens[slot] // BLOCK
            for i in range(min(full, len(self.keys[slot]))):
                self.pool.publish(self.pool.held(slot)[i], Named(self.keys[slot][i], None, ""))

    def drop(self) -> None:
        for slot in self._some():
            self.pool.release(slot)
            self.pool.release(slot)
            self.slots.give(slot)
            del self.tokens[slot], self.wanted[slot], self.keys[slot]

    def fork(self) -> None:
        for slot in self._some():
            if not len(self.slots) or self.tokens[slot] < 1 or self.pool.unpromised_blocks < 1:
                continue
            child, shared = self.slots.take(), self.rng.randint(1, self.tokens[slot])
            copies = self.pool.fork(slot, child, shared)
            assert len(copies) == (shared % BLOCK != 0)
            self.tokens[child] = self.wanted[child] = shared
            self.keys[child] = []

    def _some(self) -> list[int]:
        return self.rng.sample(sorted(self.tokens), 1) if self.tokens else []

    def check(self) -> None:
        assert self.pool.faults() == []
        assert 0 <= self.pool.unpromised_blocks <= self.pool.free_blocks
        for slot, tokens in self.tokens.items():
            assert self.pool.blocks_for(tokens) <= self.pool.held_count(slot)
        assert sum(slot in self.slots for slot in range(SLOTS)) == len(self.slots) == SLOTS - len(self.tokens)

    def end(self) -> None:
        while self.tokens:
            self.drop()
        assert self.pool.faults() == [] and self.pool.free_blocks == self.pool.unpromised_blocks == BLOCKS - 1
        assert len(self.slots) == SLOTS


def random_events(count: int, seeds: int) -> None:
    seen: set[str] = set()
    for seed in range(seeds):
        model = Model(seed)
        for _ in range(count // seeds):
            seen.add(model.event())
            model.check()
        assert model.pool.evictions > 0, "events that never fill the pool prove little"
        model.end()
    assert len(seen) == 6


def test_a4_random_events_break_no_rule() -> None:
    random_events(30_000, 6)


@pytest.mark.full
def test_a4_a_million_random_events_break_no_rule() -> None:
    random_events(1_000_000, 40)


def test_defect_2_a_slot_is_given_back_once() -> None:
    slots = SlotPool(3)
    assert [slots.take(), slots.take(2), slots.take()] == [0, 2, 1] and not len(slots)
    slots.give(2)
    with pytest.raises(RuntimeError, match="slot 2 is given back twice"):
        slots.give(2)
    assert 2 in slots and 0 not in slots and 7 not in slots and "x" not in slots


# -- snapshots


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def key(i: int) -> bytes:
    return i.to_bytes(16, "big")


def test_snapshots_leave_in_order_of_use_within_the_budget() -> None:
    store = SnapshotStore(300, 60.0, Time())
    for i in range(3):
        store.put(key(i), Snapshot(bytes([i]) * 100, i))
    assert store.get(key(0)) == Snapshot(b"\0" * 100, 0)
    store.put(key(3), Snapshot(b"3" * 150, None))
    assert [key(i) in store for i in range(4)] == [True, False, False, True] and store.bytes == 250 and store.evicted == 2
    store.put(key(4), Snapshot(b"4" * 301, None))
    assert key(4) not in store and store.bytes == 250, "what is larger than everything is not kept at all"
    store.put(key(3), Snapshot(b"x", None))
    assert store.bytes == 101 and len(store) == 2


def test_snapshots_expire_without_use() -> None:
    time = Time()
    store = SnapshotStore(1000, 60.0, time)
    store.put(key(1), Snapshot(b"a", None))
    time.now += 59
    assert store.get(key(1)) is not None
    time.now += 59
    assert store.get(key(1)) is not None, "use keeps it"
    time.now += 61
    assert key(1) not in store and store.get(key(1)) is None and store.expired == 1 and store.bytes == 0


def test_a_damaged_snapshot_counts_as_absent() -> None:
    store = SnapshotStore(1000, 60.0, Time())
    payload = bytearray(b"window")
    store.put(key(1), Snapshot(payload, None))  # type: ignore[arg-type]
    payload[2] ^= 1
    assert store.get(key(1)) is None and store.damaged == 1 and store.bytes == 0 and key(1) not in store


def test_snapshots_that_leave_memory_go_to_disk(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path / "kv", 10_000)
    store = SnapshotStore(100, 60.0, Time(), disk)
    store.put(key(1), Snapshot(b"a" * 80, 7, "me"))
    store.put(key(2), Snapshot(b"b" * 80, None))
    assert key(1) in store and store.get(key(1)) == Snapshot(b"a" * 80, 7, "me") and disk.read == 1


@pytest.mark.parametrize("way_out", ["evicted", "flushed"])
def test_a_damaged_snapshot_does_not_reach_the_disk(tmp_path: Path, way_out: str) -> None:
    """There it would get a new digest and be whole."""
    disk = DiskTier(tmp_path / "kv", 10_000)
    store = SnapshotStore(100, 60.0, Time(), disk)
    payload = bytearray(b"a" * 80)
    store.put(key(1), Snapshot(payload, None))  # type: ignore[arg-type]
    payload[2] ^= 1
    if way_out == "evicted":
        store.put(key(2), Snapshot(b"b" * 80, None))
    store.flush()
    assert not disk.has("snapshot", key(1)) and store.damaged == 1 and store.get(key(1)) is None
    assert len(disk) == (way_out == "evicted")


# -- disk


def test_the_disk_survives_a_restart(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, 10_000)
    disk.put("block", key(1), b"one", None)
    disk.put("snapshot", key(1), b"two", 128, "session é")
    disk.put("block", key(2), b"", 0)
    again = DiskTier(tmp_path, 10_000)
    assert len(again) == 3 and again.bytes == disk.bytes == sum(f.stat().st_size for f in tmp_path.iterdir())
    found = [again.get("block", key(1)), again.get("snapshot", key(1)), again.get("block", key(2)), again.get("block", key(3))]
    assert [(f.payload, f.lineage, f.session) if f else None for f in found] == [(b"one", None, ""), (b"two", 128, "session é"), (b"", 0, ""), None]


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "swap", "gone", "head"])
def test_what_is_read_from_disk_is_checked(tmp_path: Path, damage: str) -> None:
    disk = DiskTier(tmp_path, 10_000)
    disk.put("block", key(1), bytes(range(200)), 5)
    disk.put("block", key(2), bytes(200), 5)
    file, other = (tmp_path / f"block-{key(i).hex()}{SUFFIX}" for i in (1, 2))
    data = bytearray(file.read_bytes())
    if damage == "gone":
        file.unlink()
    else:
        data = {"cut": data[:-1], "empty": b"", "swap": other.read_bytes(), "flip": data, "head": data}[damage]
        if damage in ("flip", "head"):
            data[150 if damage == "flip" else 30] ^= 4
        file.write_bytes(data)
    assert disk.has("block", key(1)) and disk.get("block", key(1)) is None and disk.damaged == 1
    assert not disk.has("block", key(1)) and not file.exists()
    assert disk.get("block", key(2)) is not None, "the others are unharmed"


def test_the_disk_keeps_to_its_budget_and_to_its_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / f"block-{'0' * 31}{SUFFIX}").write_text("nearly the name")
    disk = DiskTier(tmp_path, 500)
    for i in range(6):
        disk.put("block", key(i), bytes(100), None)
    assert len(disk) == 3 and disk.evicted == 3 and disk.bytes <= 500
    assert [disk.has("block", key(i)) for i in range(6)] == [False] * 3 + [True] * 3
    assert (tmp_path / "notes.txt").read_text() == "mine" and len(list(tmp_path.iterdir())) == 5
    disk.put("block", key(9), bytes(1000), None)
    assert not disk.has("block", key(9)) and len(disk) == 3, "an entry larger than the budget is not written"
    assert len(DiskTier(tmp_path, 200)) == 1, "a smaller budget holds from the start"


def test_what_was_read_last_stays_longest_across_restarts(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, 10_000)
    for i in range(4):
        disk.put("block", key(i), bytes(100), None)
    for age, file in enumerate(sorted(tmp_path.iterdir())):
        os.utime(file, (1e9 + age, 1e9 + age))
    again = DiskTier(tmp_path, 10_000)
    oldest = min(range(4), key=lambda i: key(i).hex())
    assert again.get("block", key(oldest)) is not None
    last = DiskTier(tmp_path, again.bytes // 4)
    assert [i for i in range(4) if last.has("block", key(i))] == [oldest]


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheFolderRefused, match=r"K101.*file' - found (File exists|Not a directory)"):
        DiskTier(tmp_path / "file", 100)


def test_a_full_disk_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = DiskTier(tmp_path, 10_000)

    def full(self: Path, *args: object) -> object:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    disk.put("block", key(1), b"x", None)
    assert disk.failed == 1 and not disk.has("block", key(1)) and list(tmp_path.iterdir()) == []


def test_a_folder_that_goes_away_is_no_error(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path / "kv", 10_000)
    disk.put("block", key(1), b"x", None)
    (tmp_path / "kv" / f"block-{key(1).hex()}{SUFFIX}").unlink()
    (tmp_path / "kv").rmdir()
    (tmp_path / "kv").write_text("a file in its place")
    disk.put("block", key(2), b"x", None)
    assert disk.failed == 1 and disk.get("block", key(1)) is None and disk.damaged == 1


def test_an_entry_that_another_process_removes_meanwhile_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes share a folder: one lists it while the other makes room."""
    first = DiskTier(tmp_path, 10_000)
    for i in range(3):
        first.put("block", key(i), b"x", None)
    own, gone = Path.iterdir, tmp_path / f"block-{key(1).hex()}{SUFFIX}"

    def listed(folder: Path) -> list[Path]:
        found = list(own(folder))
        gone.unlink()
        return found

    monkeypatch.setattr(Path, "iterdir", listed)
    assert len(DiskTier(tmp_path, 10_000)) == 2


def test_two_engines_of_a_process_may_write_one_entry_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each aside under a name of its own: the second writer neither mixes its bytes with the first one's nor takes its file away."""
    first, second = DiskTier(tmp_path, 10_000), DiskTier(tmp_path, 10_000)
    replace = Path.replace

    def overtaken(self: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        second.put("block", key(1), b"the same", None, "b")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", overtaken)
    first.put("block", key(1), b"the same", None, "a")
    assert (first.failed, second.failed, len(list(tmp_path.iterdir()))) == (0, 0, 1)
    found = DiskTier(tmp_path, 10_000).get("block", key(1))
    assert found is not None and (found.payload, found.session) == (b"the same", "a")


def test_what_a_killed_process_left_half_written_is_removed_once_it_is_old(tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in (f".block-{'a' * 32}{SUFFIX}.17-0.partial", f".block-{'b' * 32}{SUFFIX}.18.partial", ".x.partial"))
    for file in (old, new, other):
        file.write_bytes(b"half")
    for file in (old, other):
        os.utime(file, (1e9, 1e9))
    DiskTier(tmp_path, 10_000)
    assert [file.exists() for file in (old, new, other)] == [False, True, True]


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_what_is_no_path_is_refused_as_a_folder(name: str) -> None:
    with pytest.raises(CacheFolderRefused, match="K101"):
        DiskTier(name, 100)
