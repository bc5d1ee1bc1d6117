"""Cache blocks: which are free, which sequence slots hold which, which are kept by name after their last holder left.

Ids run from 1; block 0 is the null block, which nobody owns. A block is free, held (by one slot, or by several once it is full and
named), or cached: named and held by nobody, evictable. Taking is all or nothing; giving back is checked; the ledger keeps what is promised
to prompts under way. The table rows are written in place: kernels read them. An interrupt may stop a change half way; who holds what and what is
named is true even then, and the rest is made anew from it. docs/runtime.md, 2.1.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from tapeout.runtime.errors import BlocksExhausted

NULL_BLOCK = 0


class Named(NamedTuple):
    """The name of a full block, and what its content depends on: None if exact, else the hit position of a replay."""

    key: bytes
    lineage: int | None
    session: str


Change = TypeVar("Change", bound=Callable[..., Any])


def _change(method: Change) -> Change:
    """A change of the books: behind one that an interrupt stopped they are put right first."""

    @wraps(method)
    def whole(pool: "BlockPool", *arguments: Any) -> Any:
        pool._put_right()
        pool._is_whole = False
        try:
            found = method(pool, *arguments)
        except BlocksExhausted:  # nothing was taken; behind any other error the books are looked through too
            pool._is_whole = True
            raise
        pool._is_whole = True
        return found

    return cast(Change, whole)


class BlockPool:
    """Blocks 1 to count - 1 of a cache and the table [slots, blocks of a sequence] that kernels look them up in.

    `on_evict` is told a cached block and its name just before the block is used for something else.
    """

    def __init__(self, count: int, block_tokens: int, table: NDArray[np.int32],
                 on_evict: Callable[[int, Named], None] | None = None) -> None:  # fmt: skip
        self.count, self.block_tokens = count, block_tokens
        self.table, self.on_evict = table, on_evict
        self.evictions = 0
        self._free = deque(range(1, count))
        self._refs = [0] * count
        self._names: dict[int, Named] = {}
        self._by_key: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._held: dict[int, list[int]] = {}
        self._promised: dict[int, int] = {}
        self._owed_to: dict[int, int] = {}  # blocks that are promised and not yet held
        self._owed = 0
        self._is_whole = True
        table[:] = NULL_BLOCK

    # -- what there is

    @property
    def free_blocks(self) -> int:
        """Blocks that can be taken: free ones and cached ones."""
        self._put_right()
        return self._available

    @property
    def cached_blocks(self) -> int:
        return len(self._cached)

    @property
    def unpromised_blocks(self) -> int:
        """Blocks that can be taken without breaking a promise; never negative as long as promises were checked."""
        return self.free_blocks - self._owed

    @property
    def _available(self) -> int:
        return len(self._free) + len(self._cached)

    @property
    def tokens_per_slot(self) -> int:
        """Tokens that one slot's row of the table can address."""
        return int(self.table.shape[1]) * self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)

    def held(self, slot: int) -> tuple[int, ...]:
        """The blocks of a slot, in the order of its tokens."""
        return tuple(self._held.get(slot, ()))

    def is_cached(self, block: int) -> bool:
        """Says whether a block is named and held by nobody."""
        return block in self._cached

    def held_count(self, slot: int) -> int:
        return len(self._held.get(slot, ()))

    # -- taking and giving back

    def reserve(self, slot: int, tokens: int) -> None:
        """Gives `slot` blocks for its first `tokens` tokens, keeping those it has. Raises BlocksExhausted, then nothing changed."""
        self.reserve_all({slot: tokens})

    @_change
    def reserve_all(self, demands: Mapping[int, int]) -> None:
        """Reserves for several slots (slot to tokens), or raises BlocksExhausted and changes nothing."""
        needed = sum(max(self.blocks_for(tokens) - self.held_count(slot), 0) for slot, tokens in demands.items())
        longest = max(demands.values(), default=0)
        if needed > self._available or longest > self.tokens_per_slot:
            limit = f"{self._available} free of {self.count - 1}, {self.tokens_per_slot} tokens a sequence"
            where = f"slots {', '.join(map(str, demands))}, up to {longest} tokens"
            raise BlocksExhausted(where, f"a need of {needed} blocks", limit)
        for slot, tokens in demands.items():
            self._extend(slot, self.blocks_for(tokens))

    @_change
    def adopt(self, slot: int, blocks: Sequence[int]) -> None:
        """Makes named blocks the first ones of a slot that holds none: each has one holder more and is safe from eviction."""
        self._adopt(slot, blocks)

    def _adopt(self, slot: int, blocks: Sequence[int]) -> None:
        if self._held.get(slot):
            raise RuntimeError(f"internal: slot {slot} adopts blocks but holds {self._held[slot]}")
        for block in blocks:
            self._cached.pop(block, None)
            self._refs[block] += 1
        self._held[slot] = list(blocks)
        self.table[slot, : len(blocks)] = blocks
        self._settle(slot)

    @_change
    def fork(self, parent: int, child: int, tokens: int) -> list[tuple[int, int]]:
        """Gives `child` the parent's first `tokens` tokens: whole blocks are shared, of a partial last one it gets its own.

        Returns (source, copy) pairs whose contents must be copied before the child's next row. Raises BlocksExhausted.
        """
        whole = tokens // self.block_tokens
        source = self._held[parent]
        if self.blocks_for(tokens) > whole and not self._available:
            raise BlocksExhausted(f"slot {child}, a copy of slot {parent}", "a need of 1 block", f"0 free of {self.count - 1}")
        self._adopt(child, source[:whole])
        self._extend(child, self.blocks_for(tokens))
        return list(zip(source[whole : self.blocks_for(tokens)], self._held[child][whole:], strict=True))

    @_change
    def release(self, slot: int) -> None:
        """Takes back all blocks of a slot, the last one first, and its promise. Nothing happens for a slot that holds none.

        A named block whose last holder leaves is cached, the deepest first in line for eviction; any other is the next to be taken.
        """
        self._promise(slot, 0)
        for block in reversed(self._held.pop(slot, [])):
            self._drop(block)
        self.table[slot] = NULL_BLOCK

    def _drop(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] < 0:
            raise RuntimeError(f"internal: block {block} is given back more often than it was taken")
        if self._refs[block] == 0:
            if block in self._names:
                self._cached[block] = None
            else:
                self._free.appendleft(block)

    def _extend(self, slot: int, count: int) -> None:
        blocks = self._held.setdefault(slot, [])
        first = len(blocks)
        if count <= first:
            return
        blocks += [self._take() for _ in range(count - first)]
        self.table[slot, first:count] = blocks[first:]
        self._settle(slot)

    def _take(self) -> int:
        block = self._free.popleft() if self._free else self._evict()
        self._refs[block] = 1
        return block

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        name = self._names.pop(block)
        del self._by_key[name.key]
        self.evictions += 1
        if self.on_evict is not None:
            self.on_evict(block, name)
        return block

    # -- promises

    @_change
    def promise(self, slot: int, tokens: int) -> None:
        """Sets what a slot may come to hold in all, for `tokens` tokens; 0 takes it back. The caller checks that it can be kept."""
        self._promise(slot, tokens)

    def _promise(self, slot: int, tokens: int) -> None:
        self._promised.pop(slot, None)
        self._owed -= self._owed_to.pop(slot, 0)
        if tokens > 0:
            self._promised[slot] = self.blocks_for(tokens)
            self._settle(slot)

    def _settle(self, slot: int) -> None:
        """What a slot has come to hold is no longer owed to it."""
        if slot in self._promised:
            owed = max(0, self._promised[slot] - self.held_count(slot))
            self._owed += owed - self._owed_to.get(slot, 0)
            self._owed_to[slot] = owed

    # -- names

    def named(self, key: bytes) -> tuple[int, Named] | None:
        """The block of this name, if there is one."""
        block = self._by_key.get(key)
        return None if block is None else (block, self._names[block])

    @_change
    def publish(self, block: int, name: Named) -> bool:
        """Names a full block that somebody holds. The first block of a name keeps it: False if there is one, or the block has a name."""
        if name.key in self._by_key or block in self._names:
            return False
        if self._refs[block] < 1:
            raise RuntimeError(f"internal: block {block} is named but nobody holds it")
        self._names[block], self._by_key[name.key] = name, block
        return True

    @_change
    def withdraw(self, block: int) -> None:
        """Takes a block's name back, as its content is not what the name says. Nothing happens for one without a name."""
        name = self._names.pop(block, None)
        if name is None:
            return
        del self._by_key[name.key]
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    # -- checking

    def _put_right(self) -> None:
        """Behind a change that was stopped: everything but holders, names and promises is made anew from these."""
        if self._is_whole:
            return
        self._refs = [0] * self.count
        for blocks in self._held.values():
            for block in blocks:
                self._refs[block] += 1
        self._by_key = {name.key: block for block, name in self._names.items()}
        self._cached = OrderedDict.fromkeys(block for block in [*self._cached, *self._names] if block in self._names and not self._refs[block])
        left = dict.fromkeys([*self._free, *range(1, self.count)])
        self._free = deque(block for block in left if not self._refs[block] and block not in self._cached)
        self._owed_to = {slot: max(0, promised - self.held_count(slot)) for slot, promised in self._promised.items()}
        self._owed = sum(self._owed_to.values())
        self.table[:] = NULL_BLOCK
        for slot, blocks in self._held.items():
            self.table[slot, : len(blocks)] = blocks
        self._is_whole = True

    def faults(self) -> list[str]:
        """Broken rules of section 2.5; an empty list is the only right answer."""
        self._put_right()
        found, entries = [], [block for blocks in self._held.values() for block in blocks]
        if sum(self._refs) != len(entries):
            found.append(f"references {sum(self._refs)}, table entries {len(entries)}")
        everything = sorted([*self._free, *self._cached, *set(entries)])
        if everything != list(range(1, self.count)):
            found.append("free, cached and held blocks are not all blocks once")
        if any(self._refs[block] != count for block, count in Counter(entries).items()):
            found.append("a block has more or fewer references than holders")
        if any(len(set(blocks)) != len(blocks) for blocks in self._held.values()):
            found.append("a slot holds a block twice")
        if {block: name.key for block, name in self._names.items()} != {block: key for key, block in self._by_key.items()}:
            found.append("names and blocks do not match")
        if self._owed != sum(self._owed_to.values()) or any(owed < 0 for owed in self._owed_to.values()):
            found.append("the ledger does not add up")
        for slot, blocks in self._held.items():
            if self.table[slot, : len(blocks)].tolist() != blocks or self.table[slot, len(blocks) :].any():
                found.append(f"the table row of slot {slot} is not what it holds")
        return found
