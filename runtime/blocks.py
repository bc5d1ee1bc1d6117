"""Cache blocks: which are free, and which sequence slot holds which (docs/runtime.md, section 2.1).

Ids run from 1; block 0 is the null block, which no sequence owns. Taking is all or nothing, giving back is checked, and the free
list is first in, first out. The table rows are written in place: kernels read them.
"""

from collections import deque
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tapeout.runtime.errors import BlocksExhausted

NULL_BLOCK = 0


class BlockPool:
    """Blocks 1 to count - 1 of a cache and the table [slots, blocks of a sequence] that kernels look them up in."""

    def __init__(self, count: int, block_tokens: int, table: NDArray[np.int32]) -> None:
        self.count, self.block_tokens = count, block_tokens
        self._table = table
        self._free = deque(range(1, count))
        self._held: dict[int, list[int]] = {}
        table[:] = NULL_BLOCK

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def tokens_per_slot(self) -> int:
        """Tokens that one slot's row of the table can address."""
        return int(self._table.shape[1]) * self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)

    def held(self, slot: int) -> tuple[int, ...]:
        """The blocks of a slot, in the order of its tokens."""
        return tuple(self._held.get(slot, ()))

    def can_hold(self, slot: int, tokens: int) -> bool:
        """Says whether `reserve` would succeed now."""
        missing = self.blocks_for(tokens) - len(self._held.get(slot, ()))
        return missing <= len(self._free) and tokens <= self.tokens_per_slot

    def reserve(self, slot: int, tokens: int) -> None:
        """Gives `slot` blocks for its first `tokens` tokens, keeping those it has. Raises BlocksExhausted, then nothing changed."""
        self.reserve_all({slot: tokens})

    def reserve_all(self, demands: Mapping[int, int]) -> None:
        """Reserves for several slots (slot to tokens), or raises BlocksExhausted and changes nothing."""
        needed = sum(max(self.blocks_for(tokens) - len(self.held(slot)), 0) for slot, tokens in demands.items())
        longest = max(demands.values(), default=0)
        if needed > len(self._free) or longest > self.tokens_per_slot:
            limit = f"{len(self._free)} free of {self.count - 1}, {self.tokens_per_slot} tokens a sequence"
            where = f"slots {', '.join(map(str, demands))}, up to {longest} tokens"
            raise BlocksExhausted(where, f"a need of {needed} blocks", limit)
        for slot, tokens in demands.items():
            self._extend(slot, tokens)

    def _extend(self, slot: int, tokens: int) -> None:
        blocks = self._held.setdefault(slot, [])
        first = len(blocks)
        blocks += [self._free.popleft() for _ in range(self.blocks_for(tokens) - first)]
        self._table[slot, first : len(blocks)] = blocks[first:]

    def release(self, slot: int) -> None:
        """Takes back all blocks of a slot, the last one first. Nothing happens for a slot that holds none."""
        self._free.extend(reversed(self._held.pop(slot, [])))
        self._table[slot] = NULL_BLOCK
