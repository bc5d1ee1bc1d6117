"""What an engine reuses of earlier prompts: the rules that an artifact's rings allow, and the prefix index over memory, host and disk.

In exact mode a prompt goes on from a stored state of all its rings, bit for bit as if it had been computed; bounded replay runs the last rows of a
prompt only through the decoder half. Programs cannot run rows without writing their blocks, so a hit needs a stored state either way.
docs/runtime.md, 2.3.
"""

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from tapeout.runtime.artifact import Artifact
from tapeout.runtime.blocks import BlockPool
from tapeout.runtime.disk import DiskTier
from tapeout.runtime.errors import OptionRefused
from tapeout.runtime.prefix import CacheIdentity, Policy, PrefixIndex
from tapeout.runtime.replay import Mode, ReplayRules, keep_rows
from tapeout.runtime.state import SnapshotStore
from tapeout.runtime.weights import BoundWeights

MIB = 1 << 20
SAMPLES, SAMPLE_BYTES = 8, 64  # of each weight, for its name in a store


@dataclass(frozen=True)
class CacheOptions:
    """Where earlier prompts are kept: window states in `snapshot_bytes` of host memory, each for `keep_s` without use; with a `folder`, blocks
    and states also in `folder_bytes` of it, across restarts."""

    snapshot_bytes: int = 256 * MIB
    keep_s: float = 600.0
    folder: str | Path | None = None
    folder_bytes: int = 16_384 * MIB

    def __post_init__(self) -> None:
        for name in ("snapshot_bytes", "folder_bytes"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise OptionRefused(f"CacheOptions.{name}", repr(value), "a whole number of bytes, at least 1")
        if isinstance(self.keep_s, bool) or not isinstance(self.keep_s, int | float) or not self.keep_s > 0:
            raise OptionRefused("CacheOptions.keep_s", repr(self.keep_s), "a number of seconds above 0")
        if self.folder is not None and not isinstance(self.folder, str | Path):
            raise OptionRefused("CacheOptions.folder", repr(self.folder), "the path of a folder, or None")


def replay_rules(artifact: Artifact, mode: Mode, keep: int | None) -> ReplayRules:
    """The rules that fit an artifact: its rings hold a window and room to take back a drafted block. Raises OptionRefused.

    `keep`: rows of a prompt that the decoder half runs; None: the fewest.
    """
    backtrack = artifact.draft_block + 1
    rings = [state.length or 1 for state in artifact.manifest.states if state.kind == "ring"]
    window = max(1, max(rings, default=1) - backtrack)
    least = keep_rows(window, backtrack)
    return ReplayRules(mode, least if keep is None else keep, window, backtrack, artifact.manifest.options.block_tokens,
                       is_whole=mode is Mode.EXACT, replays=False)  # fmt: skip


def prefix_index(artifact: Artifact, weights: BoundWeights, pool: BlockPool, rules: ReplayRules, options: CacheOptions | None,
                 clock: Callable[[], float]) -> PrefixIndex:  # fmt: skip
    """The index of an engine; without options it reuses nothing and only plans rows. Raises CacheFolderRefused."""
    truncation = f"{rules.mode.value} {rules.keep if rules.mode is not Mode.EXACT else 0}"
    identity = CacheIdentity(weights_digest(weights), artifact.manifest.identity, truncation)
    if options is None:
        return PrefixIndex(pool, rules, identity)
    disk = None if options.folder is None else DiskTier(options.folder, options.folder_bytes)
    snapshots = SnapshotStore(options.snapshot_bytes, options.keep_s, clock, disk)
    return PrefixIndex(pool, rules, identity, Policy.PRODUCTION, snapshots, disk)


def weights_digest(weights: BoundWeights) -> str:
    """A name for the weights: over the files' stamp and the name, shape and some bytes of all that parts are made of, all bytes of small tensors.

    Samples alone would take a checkpoint of which a few rows were edited for the one before, and its windows for the new one's.
    """
    digest = blake2b(weights.stamp.encode(), digest_size=16)
    stored = {name: array for key in weights.parts for name, array in weights.parts.stored(key)}
    for name, array in sorted(stored.items()):
        digest.update(f"{name} {array.shape} {array.dtype}".encode())
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if flat.size <= MIB:
            digest.update(flat.tobytes())
            continue
        for place in np.linspace(0, max(0, flat.size - SAMPLE_BYTES), SAMPLES).astype(np.int64).tolist():
            digest.update(flat[place : place + SAMPLE_BYTES].tobytes())
    return digest.hexdigest()
