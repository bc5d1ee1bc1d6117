"""The prefix index: names of full blocks, which of them a prompt may reuse, and why it may not.

A name chains over all tokens before it, the images they stand for, the model and its formats, the replay rules and the tenant. What may
enter, who may use it (lineage), where a hit ends and what a miss is called are the rules of docs/runtime.md, 2.3. How the rows behind a hit
are computed is `replay.py`.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from tapeout.runtime.blocks import BlockPool, Named
from tapeout.runtime.disk import DiskTier, Stored
from tapeout.runtime.errors import OptionRefused
from tapeout.runtime.replay import Mode, ReplayPlan, ReplayRules, latest_restore, replay_plan
from tapeout.runtime.request import ImageSpan
from tapeout.runtime.state import Snapshot, SnapshotStore

KEY_BYTES = 16


class Outcome(Enum):
    """What a lookup came to; every one but HIT is the reason of a miss."""

    HIT = "hit"
    OFF = "reuse is off in exact mode"
    SHORT = "no whole block before the last token"
    UNKNOWN = "the first block is not known"
    LINEAGE = "known blocks depend on another session's replay"
    IMAGE = "no boundary outside an image"
    WINDOW = "the hit is no longer than the window"
    STATE = "no window state is kept at a boundary of the hit"


class Policy(Enum):
    """Who may use blocks that a replay computed: only their own session, or everybody."""

    STRICT = "strict"
    PRODUCTION = "production"


@dataclass(frozen=True)
class CacheIdentity:
    """What two caches must share for a block of one to mean the same in the other."""

    model: str
    kv_format: str = ""
    truncation: str = ""


def chain_root(identity: CacheIdentity, tenant: str) -> bytes:
    """key(-1): the start of every chain of names of this model and tenant."""
    parts = ("v1", identity.model, identity.kv_format, identity.truncation, tenant)
    return blake2b(b"".join(len(part.encode()).to_bytes(4, "little") + part.encode() for part in parts), digest_size=KEY_BYTES).digest()


def block_key(parent: bytes, tokens: Sequence[int], extra: bytes = b"") -> bytes:
    """The name of a block: over its parent's name, its tokens as little-endian 32-bit numbers, and the images in it."""
    return blake2b(parent + np.asarray(tokens, dtype="<i4").tobytes() + extra, digest_size=KEY_BYTES).digest()


def image_extra(images: Sequence[ImageSpan], start: int, end: int) -> bytes:
    """Digests of the images that touch tokens `start` to `end` - 1, each with the place of `start` in its span, negative before it."""
    touching = [image for image in images if image.start < end and image.end > start]
    return b"".join((start - image.start).to_bytes(4, "little", signed=True) + image.digest for image in touching)


def chain(root: bytes, tokens: Sequence[int], images: Sequence[ImageSpan], block: int, known: list[bytes]) -> list[bytes]:
    """Extends `known`, the names of the first blocks, to all whole blocks of `tokens`, in place; returns it."""
    for i in range(len(known), len(tokens) // block):
        start = i * block
        extra = image_extra(images, start, start + block) if images else b""
        known.append(block_key(known[-1] if known else root, tokens[start : start + block], extra))
    return known


def boundary_outside(images: Sequence[ImageSpan], tokens: int, block: int) -> int:
    """The last whole block's end at or before `tokens` that cuts no image."""
    end = tokens // block * block
    while any(image.start < end < image.end for image in images):
        end -= block
    return end


@dataclass(frozen=True)
class Hit:
    """What of a prompt need not be computed. `blocks`, then `loads` (names on disk), are the blocks before `plan.write_from`; `known` tokens have
    blocks, used or not."""

    outcome: Outcome
    plan: ReplayPlan
    keys: tuple[bytes, ...] = ()
    blocks: tuple[int, ...] = ()
    loads: tuple[bytes, ...] = ()
    lineage: int | None = None
    known: int = 0

    @property
    def tokens(self) -> int:
        """Tokens whose blocks are reused."""
        return self.plan.write_from


class Payloads(NamedTuple):
    """What a hit takes from host memory and disk: the window state to put back, and the blocks to load, in order."""

    window: Snapshot | None = None
    blocks: tuple[Stored, ...] = ()


class PrefixIndex:
    """Finds and names blocks of a pool. `snapshots` and `disk` may be absent; `outcomes` counts lookups."""

    def __init__(self, pool: BlockPool, rules: ReplayRules, identity: CacheIdentity, policy: Policy = Policy.PRODUCTION,
                 snapshots: SnapshotStore | None = None, disk: DiskTier | None = None) -> None:  # fmt: skip
        if rules.block != pool.block_tokens:
            raise OptionRefused("ReplayRules.block", rules.block, f"the cache's block of {pool.block_tokens} tokens")
        self.pool, self.rules, self.identity, self.policy = pool, rules, identity, policy
        self.snapshots, self.disk = snapshots, disk
        self.outcomes: Counter[Outcome] = Counter()
        self._roots: dict[str, bytes] = {}

    def root(self, tenant: str) -> bytes:
        """The start of a tenant's chains."""
        if tenant not in self._roots:
            self._roots[tenant] = chain_root(self.identity, tenant)
        return self._roots[tenant]

    def lookup(self, tokens: Sequence[int], images: Sequence[ImageSpan], tenant: str, session: str, keys: list[bytes]) -> Hit:
        """The best use of what is cached for a prompt; nothing is taken. `keys` are its names so far and grow in place."""
        length, block = len(tokens), self.rules.block
        start = replay_plan(length, 0, (), self.rules)
        if self.rules.mode is Mode.EXACT and not self.rules.is_whole:
            return Hit(Outcome.OFF, start)
        most = (length - 1) // block
        if not most:
            return Hit(Outcome.SHORT, start)
        chain(self.root(tenant), tokens, images, block, keys)
        found, names, loads, refused = self._known(keys[:most], session)
        if not found and not loads:
            return Hit(Outcome.LINEAGE if refused else Outcome.UNKNOWN, start)
        hit = boundary_outside(images, block * (len(found) + len(loads)), block)
        if not hit:
            return Hit(Outcome.IMAGE, start)
        plan = replay_plan(length, hit, self._snapshot_at(keys, latest_restore(length, hit, self.rules), images), self.rules)
        used = plan.write_from // block
        if not used:
            return Hit(Outcome.WINDOW if self._may_replay else Outcome.STATE, start, known=hit)
        lineages = [name for name in names[:used] if name is not None]
        lineage = plan.lineage if plan.lineage is not None else max(lineages, default=None)
        return Hit(Outcome.HIT, plan, tuple(keys[:used]), tuple(found[:used]), tuple(loads[: max(0, used - len(found))]), lineage, hit)

    def read(self, hit: Hit, keys: Sequence[bytes]) -> Payloads | None:
        """What a hit needs, read once; None if some of it is damaged or gone: then the next lookup of the prompt, named `keys`, finds less."""
        window = None
        if hit.plan.restore_at is not None and self.snapshots is not None:
            window = self.snapshots.get(keys[hit.plan.restore_at // self.rules.block - 1])
            if window is None:
                return None
        blocks = tuple(found for key in hit.loads if self.disk is not None and (found := self.disk.get("block", key)) is not None)
        return Payloads(window, blocks) if len(blocks) == len(hit.loads) else None

    @property
    def _may_replay(self) -> bool:
        return self.rules.replays and self.rules.mode is not Mode.EXACT

    def count(self, hit: Hit) -> None:
        """Counts a lookup that led to an admission."""
        self.outcomes[hit.outcome] += 1

    def gauges(self) -> dict[str, float]:
        """Lookups by outcome, and what host memory and disk hold, gave and refused; for `Statistics`."""
        found: dict[str, float] = {f"prefix_{outcome.name.lower()}": times for outcome, times in self.outcomes.items()}
        if self.snapshots is not None:
            found |= {"snapshots": len(self.snapshots), "snapshot_bytes": self.snapshots.bytes}
            found |= {f"snapshots_{name}": getattr(self.snapshots, name) for name in ("evicted", "expired", "damaged")}
        if self.disk is not None:
            names = ("bytes", "written", "read", "damaged", "evicted", "failed")
            found |= {"disk_entries": len(self.disk)} | {f"disk_{name}": getattr(self.disk, name) for name in names}
        return found

    def _known(self, keys: Sequence[bytes], session: str) -> tuple[list[int], list[int | None], list[bytes], bool]:
        """Leading blocks in memory, their lineages, those that follow on disk, and whether a known block was refused."""
        found: list[int] = []
        lineages: list[int | None] = []
        for key in keys:
            named = self.pool.named(key)
            if named is None:
                break
            if not self._may_use(named[1], session):
                return found, lineages, [], True
            found.append(named[0])
            lineages.append(named[1].lineage)
        loads = []
        for key in keys[len(found) :]:
            if self.disk is None or self.pool.named(key) is not None or not self.disk.has("block", key):
                break
            loads.append(key)
        return found, lineages, loads, False

    def _may_use(self, named: Named, session: str) -> bool:
        return self.policy is Policy.PRODUCTION or named.lineage is None or named.session == session

    def _snapshot_at(self, keys: Sequence[bytes], latest: int, images: Sequence[ImageSpan]) -> Collection[int]:
        """Where the last window is stored that ends at `latest` or before and cuts no image, if there is one."""
        block, number = self.rules.block, latest // self.rules.block
        while self.snapshots is not None and (number := self.snapshots.last_of(keys, number)):
            if not any(i.start < number * block < i.end for i in images):
                return (number * block,)
            number -= 1
        return ()

    def publish(self, slot: int, keys: Sequence[bytes], first: int, lineage: int | None, session: str) -> list[int]:
        """Names a slot's full, committed blocks from number `first` on; returns those that are new under their name."""
        held = self.pool.held(slot)
        return [i for i in range(first, len(keys)) if self.pool.publish(held[i], Named(keys[i], lineage, session))]

    def withdraw(self, slot: int, keys: Sequence[bytes]) -> None:
        """Forgets what is kept of a slot whose rows came to nothing: its blocks, and all that is stored under their names, may be as wrong."""
        for block in self.pool.held(slot):
            self.pool.withdraw(block)
        for key in keys:
            if self.snapshots is not None:
                self.snapshots.drop(key)
            if self.disk is not None:
                self.disk.drop(key)

    def may_keep_snapshot(self, plan: ReplayPlan | None, end: int) -> bool:
        """Says whether the window state at `end` may be kept: after a replay only once a whole window was computed behind the hit."""
        return plan is None or plan.lineage is None or end - plan.write_from >= self.rules.window
