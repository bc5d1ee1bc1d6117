"""The block pool against a plain model of it: nothing is lost, nothing is held twice, the table says what is held."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tapeout.runtime.blocks import BlockPool, Named
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
        can = -(-tokens // TOKENS) - len(before[slot]) <= self.pool.free_blocks and tokens <= WIDTH * TOKENS
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
        assert len(held) == len(set(held)) == COUNT - 1 - self.pool.free_blocks and 0 not in held
        assert self.pool.faults() == []

    @invariant()
    def the_table_says_what_is_held(self) -> None:
        for slot in range(SLOTS):
            held = self.pool.held(slot)
            assert len(held) == -(-self.tokens[slot] // TOKENS)
            assert self.table[slot].tolist() == [*held, *[0] * (WIDTH - len(held))]


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_fresh_blocks_are_first_in_first_out_and_given_back_ones_come_next() -> None:
    blocks = pool()
    blocks.reserve(0, 8)
    blocks.reserve(1, 4)
    assert (blocks.held(0), blocks.held(1)) == ((1, 2), (3,))
    blocks.release(0)
    blocks.reserve(2, 9 * 4 - 12)
    assert blocks.held(2) == (1, 2, 4, 5, 6, 7), "what was in use a moment ago is taken before what never was"


def test_exhaustion_is_typed_and_exact() -> None:
    blocks = pool(5)
    with pytest.raises(BlocksExhausted) as refused:
        blocks.reserve_all({0: 9, 2: 5})
    assert str(refused.value) == (
        "[B101] there are not enough free cache blocks - slots 0, 2, up to 9 tokens - found a need of 5 blocks, "
        "expected 4 free of 4, 24 tokens a sequence - wait for running requests, or give the engine more cache blocks"
    )
    assert blocks.free_blocks == 4 and blocks.held(0) == ()


def test_release_of_nothing_is_nothing() -> None:
    blocks = pool()
    blocks.release(1)
    blocks.release(1)
    assert blocks.free_blocks == COUNT - 1


# -- names, sharing, promises


def name(i: int) -> Named:
    return Named(bytes([i]) * 16, None, "s")


def named_pool() -> BlockPool:
    """Slot 0 holds blocks 1, 2, 3, all named."""
    blocks = pool()
    blocks.reserve(0, 12)
    for i, block in enumerate(blocks.held(0)):
        assert blocks.publish(block, name(i))
    return blocks


def test_named_blocks_stay_when_their_holder_leaves() -> None:
    blocks = named_pool()
    blocks.release(0)
    assert (blocks.free_blocks, blocks.cached_blocks) == (COUNT - 1, 3)
    assert [blocks.named(name(i).key) for i in range(3)] == [(i + 1, name(i)) for i in range(3)]
    blocks.adopt(1, (1, 2))
    assert (blocks.held(1), blocks.cached_blocks, blocks.faults()) == ((1, 2), 1, [])
    blocks.reserve(1, 12)
    assert blocks.held(1) == (1, 2, 4), "a free block comes before a cached one"


def test_a_block_has_several_holders_and_is_given_back_by_each() -> None:
    blocks = named_pool()
    blocks.adopt(1, (1, 2))
    blocks.release(0)
    assert blocks.cached_blocks == 1 and blocks.faults() == []
    blocks.release(1)
    blocks.release(1)
    assert blocks.cached_blocks == 3 and blocks.faults() == []


def test_the_deepest_block_is_evicted_first_and_its_name_is_told() -> None:
    told: list[tuple[int, Named]] = []
    blocks = BlockPool(5, TOKENS, np.zeros((SLOTS, WIDTH), np.int32), lambda block, known: told.append((block, known)))
    blocks.reserve(0, 12)
    for i, block in enumerate(blocks.held(0)):
        blocks.publish(block, name(i))
    blocks.release(0)
    blocks.reserve(1, 12)
    assert told == [(3, name(2)), (2, name(1))] and blocks.held(1) == (4, 3, 2) and blocks.evictions == 2
    assert blocks.named(name(0).key) == (1, name(0)) and blocks.named(name(2).key) is None


def test_the_first_block_of_a_name_keeps_it() -> None:
    blocks = named_pool()
    blocks.reserve(1, 4)
    (other,) = blocks.held(1)
    assert not blocks.publish(other, name(0)) and not blocks.publish(1, name(7))
    assert blocks.named(name(0).key) == (1, name(0)) and blocks.named(name(7).key) is None
    blocks.release(1)
    assert blocks.cached_blocks == 0, "the copy has no name and is free again"


def test_promises_are_kept_from_others_and_shrink_as_they_are_fulfilled() -> None:
    blocks = pool()
    blocks.promise(0, 24)
    assert (blocks.free_blocks, blocks.unpromised_blocks) == (11, 5)
    blocks.reserve(0, 8)
    assert (blocks.free_blocks, blocks.unpromised_blocks) == (9, 5)
    blocks.reserve(0, 24)
    assert blocks.unpromised_blocks == blocks.free_blocks == 5
    blocks.release(0)
    assert blocks.unpromised_blocks == blocks.free_blocks == 11 and blocks.faults() == []


def test_a_fork_shares_whole_blocks_and_copies_the_partial_one() -> None:
    blocks = pool()
    blocks.reserve(0, 10)
    assert blocks.fork(0, 1, 10) == [(3, 4)]
    assert (blocks.held(1), blocks.faults()) == ((1, 2, 4), [])
    assert blocks.fork(0, 2, 8) == [] and blocks.held(2) == (1, 2)
    for slot in (0, 1, 2):
        blocks.release(slot)
    assert blocks.free_blocks == COUNT - 1 and blocks.faults() == []


def test_a_fork_without_a_free_block_changes_nothing() -> None:
    blocks = pool(4)
    blocks.reserve(0, 10)
    with pytest.raises(BlocksExhausted, match="slot 1, a copy of slot 0"):
        blocks.fork(0, 1, 10)
    assert blocks.held(1) == () and blocks.faults() == []
