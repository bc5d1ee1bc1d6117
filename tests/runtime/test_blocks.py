"""The block pool against a plain model of it: nothing is lost, nothing is held twice, the table says what is held."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tapeout.runtime.blocks import BlockPool
from tapeout.runtime.errors import BlocksExhausted

COUNT, TOKENS, SLOTS, WIDTH = 12, 4, 3, 6


def pool(count: int = COUNT) -> BlockPool:
    return BlockPool(count, TOKENS, np.full((SLOTS, WIDTH), -7, dtype=np.int32))


class PoolMachine(RuleBasedStateMachine):
    """Random reservations and releases."""

    def __init__(self) -> None:
        super().__init__()
        self.table = np.full((SLOTS, WIDTH), -7, dtype=np.int32)
        self.pool = BlockPool(COUNT, TOKENS, self.table)
        self.tokens = dict.fromkeys(range(SLOTS), 0)

    @rule(slot=st.integers(0, SLOTS - 1), tokens=st.integers(0, WIDTH * TOKENS + 2))
    def reserve(self, slot: int, tokens: int) -> None:
        before = {s: self.pool.held(s) for s in range(SLOTS)}
        can = self.pool.can_hold(slot, tokens)
        try:
            self.pool.reserve(slot, tokens)
        except BlocksExhausted:
            assert not can
            assert before == {s: self.pool.held(s) for s in range(SLOTS)}
            return
        assert can
        self.tokens[slot] = max(self.tokens[slot], tokens)
        assert self.pool.held(slot)[: len(before[slot])] == before[slot], "blocks that hold tokens stay where they are"

    @rule(slot=st.integers(0, SLOTS - 1))
    def release(self, slot: int) -> None:
        self.pool.release(slot)
        self.tokens[slot] = 0

    @invariant()
    def every_block_is_somewhere_once(self) -> None:
        held = [block for slot in range(SLOTS) for block in self.pool.held(slot)]
        everything = sorted([*held, *self.pool._free])
        assert everything == list(range(1, COUNT)), "block 0 is never given out"

    @invariant()
    def the_table_says_what_is_held(self) -> None:
        for slot in range(SLOTS):
            held = self.pool.held(slot)
            assert len(held) == -(-self.tokens[slot] // TOKENS)
            assert self.table[slot].tolist() == [*held, *[0] * (WIDTH - len(held))]


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_blocks_are_first_in_first_out() -> None:
    blocks = pool()
    blocks.reserve(0, 8)
    blocks.reserve(1, 4)
    assert (blocks.held(0), blocks.held(1)) == ((1, 2), (3,))
    blocks.release(0)
    blocks.reserve(2, 9 * 4 - 12)
    assert blocks.held(2) == (4, 5, 6, 7, 8, 9)
    blocks.reserve(0, 16)
    assert blocks.held(0) == (10, 11, 2, 1), "released blocks come back last, the deepest first"


def test_exhaustion_is_typed_and_exact() -> None:
    blocks = pool(5)
    with pytest.raises(BlocksExhausted) as refused:
        blocks.reserve_all({0: 9, 2: 5})
    assert str(refused.value) == (
        "[C101] there are not enough free cache blocks - slots 0, 2, up to 9 tokens - found a need of 5 blocks, "
        "expected 4 free of 4, 24 tokens a sequence - wait for running requests, or give the engine more cache blocks"
    )
    assert blocks.free_blocks == 4 and blocks.held(0) == ()


def test_release_of_nothing_is_nothing() -> None:
    blocks = pool()
    blocks.release(1)
    blocks.release(1)
    assert blocks.free_blocks == COUNT - 1
