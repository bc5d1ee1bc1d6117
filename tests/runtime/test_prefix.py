"""The prefix index: A5 against a dictionary of whole prefixes, names, lineage, misses by reason, and what the disk gives back."""

import random
from pathlib import Path

import numpy as np
import pytest

from tapeout.runtime.blocks import BlockPool, Named
from tapeout.runtime.disk import DiskTier
from tapeout.runtime.errors import OptionRefused
from tapeout.runtime.prefix import CacheIdentity, Outcome, Policy, PrefixIndex, block_key, boundary_outside, chain, chain_root, image_extra
from tapeout.runtime.replay import Mode, ReplayRules
from tapeout.runtime.request import ImageSpan
from tapeout.runtime.state import Snapshot, SnapshotStore
from tests.runtime.null import forget_names, prompt, serving

BLOCK = 4
RULES = ReplayRules(Mode.COMPACT, 6, window=4, backtrack=2, block=BLOCK)
IDENTITY = CacheIdentity("model", "fp4", "compact 6")


def index(blocks: int = 64, rules: ReplayRules = RULES, **more: object) -> PrefixIndex:
    pool = BlockPool(blocks, BLOCK, np.zeros((4, 40), np.int32))
    return PrefixIndex(pool, rules, IDENTITY, **more)  # type: ignore[arg-type]


def store(found: PrefixIndex, tokens: list[int], *, tenant: str = "", session: str = "a", lineage: int | None = None, slot: int = 0,
          images: tuple[ImageSpan, ...] = ()) -> list[bytes]:  # fmt: skip
    """Computes a prompt and lets it go: its full blocks are cached."""
    keys: list[bytes] = []
    hit = found.lookup(tokens, images, tenant, session, keys)
    found.pool.adopt(slot, hit.blocks)
    found.pool.reserve(slot, len(tokens))
    chain(found.root(tenant), tokens, images, BLOCK, keys)
    found.publish(slot, keys, len(hit.blocks), lineage, session)
    found.pool.release(slot)
    return keys


# -- names


def test_a_name_depends_on_everything_before_it() -> None:
    root = chain_root(IDENTITY, "t")
    names = {
        "plain": chain(root, [1, 2, 3, 4, 5, 6, 7, 8], (), BLOCK, [])[1],
        "other first block": chain(root, [1, 2, 3, 9, 5, 6, 7, 8], (), BLOCK, [])[1],
        "other tenant": chain(chain_root(IDENTITY, ""), [1, 2, 3, 4, 5, 6, 7, 8], (), BLOCK, [])[1],
        "other model": chain(chain_root(CacheIdentity("m", "fp4", "compact 6"), "t"), [1, 2, 3, 4, 5, 6, 7, 8], (), BLOCK, [])[1],
        "other format": chain(chain_root(CacheIdentity("model", "fp8", "compact 6"), "t"), [1, 2, 3, 4, 5, 6, 7, 8], (), BLOCK, [])[1],
        "other replay": chain(chain_root(CacheIdentity("model", "fp4", "exact"), "t"), [1, 2, 3, 4, 5, 6, 7, 8], (), BLOCK, [])[1],
        "an image": chain(root, [1, 2, 3, 4, 5, 6, 7, 8], (ImageSpan(2, 3, b"cat"),), BLOCK, [])[1],
        "another image": chain(root, [1, 2, 3, 4, 5, 6, 7, 8], (ImageSpan(2, 3, b"dog"),), BLOCK, [])[1],
        "its first block": chain(root, [1, 2, 3, 4], (), BLOCK, [])[0],
    }
    assert len(set(names.values())) == len(names) and all(len(name) == 16 for name in names.values())
    assert chain_root(CacheIdentity("a", "bc"), "") != chain_root(CacheIdentity("ab", "c"), ""), "lengths are part of a name"


def test_a_chain_grows_in_place_and_only_by_whole_blocks() -> None:
    root, known = chain_root(IDENTITY, ""), []
    assert chain(root, [1, 2, 3], (), BLOCK, known) == []
    first = list(chain(root, [1, 2, 3, 4, 5], (), BLOCK, known))
    assert first == [block_key(root, [1, 2, 3, 4])]
    assert chain(root, list(range(1, 13)), (), BLOCK, known)[:1] == first and len(known) == 3


def test_an_image_names_every_block_it_touches_with_its_offset() -> None:
    image = ImageSpan(3, 9, b"D" * 16)
    assert image_extra((image,), 0, 3) == b"" == image_extra((image,), 9, 12)
    assert image_extra((image,), 0, 4) == b"\xfd\xff\xff\xff" + b"D" * 16
    assert image_extra((image,), 4, 8) == b"\1\0\0\0" + b"D" * 16
    assert [boundary_outside((image,), tokens, BLOCK) for tokens in (3, 7, 8, 11, 12, 16)] == [0, 0, 0, 0, 12, 16]
    assert boundary_outside((ImageSpan(4, 8, b""),), 8, BLOCK) == 8, "an image that ends at a boundary is not cut by it"


# -- A5


def brute_force(held: set[tuple[object, ...]], tokens: list[int], images: tuple[ImageSpan, ...], tenant: str) -> tuple[int, Outcome]:
    """Tokens of the hit and its name, from whole prefixes in a set."""
    most = (len(tokens) - 1) // BLOCK
    if not most:
        return 0, Outcome.SHORT
    count = 0
    while count < most and signature(tokens, images, tenant, count + 1) in held:
        count += 1
    if not count:
        return 0, Outcome.UNKNOWN
    while any(image.start < count * BLOCK < image.end for image in images):
        count -= 1
    if not count:
        return 0, Outcome.IMAGE
    replay_from = min(count * BLOCK - RULES.window, max(0, len(tokens) - RULES.keep))
    if count * BLOCK <= RULES.window or replay_from <= 0:
        return 0, Outcome.WINDOW
    return count * BLOCK, Outcome.HIT


def signature(tokens: list[int], images: tuple[ImageSpan, ...], tenant: str, blocks: int) -> tuple[object, ...]:
    end = blocks * BLOCK
    seen = tuple((image.start, min(image.end, end), image.digest) for image in images if image.start < end)
    return tenant, tuple(tokens[:end]), seen


def random_prompt(rng: random.Random) -> tuple[list[int], tuple[ImageSpan, ...]]:
    tokens: list[int] = []
    while len(tokens) < 40 and rng.random() < 0.9:
        tokens += [rng.randrange(2)] * rng.choice([1, 4, 4, 8])
    tokens = tokens or [0]
    images = []
    if rng.random() < 0.3 and len(tokens) > 6:
        start = rng.randrange(len(tokens) - 3)
        end = min(len(tokens), start + rng.randint(1, 9))
        images.append(ImageSpan(start, end, bytes([rng.randrange(2), end - start])))  # the content decides the length
    return tokens, tuple(images)


def against_a_dictionary(prompts: int, seed: int) -> None:
    rng, found = random.Random(seed), index(blocks=30)
    held: set[tuple[object, ...]] = set()
    by_block: dict[int, tuple[object, ...]] = {}
    found.pool.on_evict = lambda block, name: held.discard(by_block.pop(block))
    for i in range(prompts):
        tokens, images = random_prompt(rng)
        tenant, keys = rng.choice(["", "", "other"]), []
        hit = found.lookup(tokens, images, tenant, str(i), keys)
        assert (hit.tokens, hit.outcome) == brute_force(held, tokens, images, tenant), (tokens, images)
        found.pool.adopt(0, hit.blocks)
        found.pool.reserve(0, len(tokens))
        chain(found.root(tenant), tokens, images, BLOCK, keys)
        for number in found.publish(0, keys, len(hit.blocks), None, str(i)):
            by_block[found.pool.held(0)[number]] = signature(tokens, images, tenant, number + 1)
            held.add(signature(tokens, images, tenant, number + 1))
        found.pool.release(0)
    assert found.pool.evictions > prompts / 20 and found.pool.faults() == []


def test_a5_lookup_equals_a_dictionary_of_prefixes() -> None:
    against_a_dictionary(6000, 1)


@pytest.mark.full
def test_a5_lookup_equals_a_dictionary_of_prefixes_100_000_prompts() -> None:
    against_a_dictionary(100_000, 2)


# -- misses have reasons


def test_every_lookup_has_one_name() -> None:
    found = index()
    text = list(range(30))
    assert found.lookup(text[:4], (), "", "x", []).outcome is Outcome.SHORT, "a whole block, but none before the last token"
    assert found.lookup(text, (), "", "x", []).outcome is Outcome.UNKNOWN
    store(found, text[:5])
    assert found.lookup(text, (), "", "x", []).outcome is Outcome.WINDOW, "4 tokens are no more than the window"
    store(found, text[:9])
    assert found.lookup(text, (), "", "x", []).outcome is Outcome.HIT
    assert index(rules=ReplayRules(Mode.EXACT, 0, window=4, backtrack=2, block=BLOCK)).lookup(text, (), "", "x", []).outcome is Outcome.OFF
    image = (ImageSpan(0, 12, b"i"),)
    store(found, text, images=image)
    assert found.lookup(text[:11], image, "", "x", []).outcome is Outcome.IMAGE
    for hit in (found.lookup(text, (), "", "x", []),) * 2:
        found.count(hit)
    assert found.outcomes[Outcome.HIT] == 2


@pytest.mark.parametrize("shared", range(3 * BLOCK + 1))
def test_r26_the_longest_boundary_below_the_divergence_is_used(shared: int) -> None:
    found, first = index(), list(range(40))
    store(found, first)
    hit = found.lookup(first[:shared] + [99] * (40 - shared), (), "", "x", [])
    boundary = shared // BLOCK * BLOCK
    assert hit.tokens == (boundary if boundary > RULES.window else 0)


@pytest.mark.parametrize("blocks", [2, 7, 100, 1000])
def test_r27_long_prompts_hit_as_short_ones_do(blocks: int) -> None:
    pool = BlockPool(2 * blocks + 2, BLOCK, np.zeros((1, 2 * blocks + 1), np.int32))
    found = PrefixIndex(pool, RULES, IDENTITY)
    text = [(i * i) % 251 for i in range(2 * blocks * BLOCK)]
    store(found, text)
    half = blocks * BLOCK
    assert found.lookup(text[:half] + [300] * half, (), "", "x", []).tokens == half


@pytest.mark.parametrize(("hit", "used"), [(3, 0), (4, 0), (5, 0), (7, 0), (8, 8), (9, 8), (12, 12)])
def test_r25_hits_no_longer_than_the_window_are_not_used(hit: int, used: int) -> None:
    found, text = index(), list(range(40))
    store(found, text[:hit])
    assert found.lookup(text, (), "", "x", []).tokens == used


def test_at_least_one_token_is_computed() -> None:
    found, text = index(), list(range(16))
    store(found, text)
    assert [found.lookup(text[:length], (), "", "x", []).tokens for length in (16, 15, 13, 12)] == [12, 12, 12, 8]


# -- lineage


def test_replayed_blocks_are_their_own_sessions_under_strict() -> None:
    text = list(range(24))
    for policy, others in ((Policy.STRICT, 0), (Policy.PRODUCTION, 20)):
        found = index(policy=policy)
        store(found, text[:8])
        forget_names(found.pool)
        store(found, text, lineage=8, session="a")
        assert found.lookup(text, (), "", "a", []).tokens == 20
        hit = found.lookup(text, (), "", "b", [])
        assert hit.tokens == others and hit.outcome is (Outcome.HIT if others else Outcome.LINEAGE)


def test_what_follows_a_replay_depends_on_it() -> None:
    found, text = index(), list(range(24))
    store(found, text[:13])
    assert found.lookup(text, (), "", "x", []).lineage == 12, "no snapshot: the window is replayed"
    store(found, text, lineage=12)
    hit = found.lookup([*text, 9, 9], (), "", "x", [])
    assert (hit.tokens, hit.lineage) == (24, 24)


def test_only_replays_older_than_a_window_leave_snapshots() -> None:
    found, text = index(), list(range(40))
    store(found, text[:17])
    plan = found.lookup(text, (), "", "x", []).plan
    assert plan.write_from == 16 and plan.lineage == 16
    assert [found.may_keep_snapshot(plan, end) for end in (16, 19, 20, 24)] == [False, False, True, True]
    assert found.may_keep_snapshot(None, 4)


# -- snapshots and disk


def test_a_snapshot_spares_the_replay() -> None:
    snapshots = SnapshotStore(1000, 60.0, lambda: 0.0)
    found, text = index(snapshots=snapshots), list(range(30))
    keys = store(found, text)
    assert found.lookup(text, (), "", "x", []).plan.lineage == 28
    snapshots.put(keys[5], Snapshot(b"w", None))
    plan = found.lookup([*text, *range(30)], (), "", "x", []).plan
    assert (plan.restore_at, plan.lineage, plan.replayed_rows) == (24, None, 28 - 24), "exact, from the snapshot on"


def test_the_disk_continues_where_memory_ends(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, 10_000)
    found, text = index(disk=disk), list(range(30))
    keys = store(found, text)
    for i, key in enumerate(keys):
        disk.put("block", key, bytes([i]), None)
    fresh = index(disk=disk)
    hit = fresh.lookup(text, (), "", "x", [])
    assert (hit.tokens, hit.blocks, hit.loads) == (28, (), tuple(keys))
    store(fresh, text[:9])
    hit = fresh.lookup(text, (), "", "x", [])
    assert (len(hit.blocks), hit.loads) == (2, tuple(keys[2:]))


def test_rules_and_pool_agree_on_the_block() -> None:
    with pytest.raises(OptionRefused, match=r"ReplayRules\.block - found 128, expected the cache's block of 4 tokens"):
        index(rules=ReplayRules(Mode.COMPACT, 140))


# -- on the null device, which compares every row with what the cache holds


def test_r24_a_slot_that_others_used_shows_nothing_of_them() -> None:
    s = serving(slots=1)
    for i, text in enumerate([prompt(40, 1), prompt(33, 2), prompt(40, 1), prompt(50, 3), prompt(40, 1)]):
        s.submit(f"r{i}", text, max_tokens=6, ignore_eos=True)
    s.run()
    assert s.tokens("r0") == s.tokens("r2") == s.tokens("r4") == s.expected("r0")
    assert s.scheduler.roster.branches("r2")[0].hit_tokens == 32
    s.assert_empty()


def test_preempted_requests_find_their_own_blocks_under_strict() -> None:
    s = serving(slots=4, blocks=14, policy=Policy.STRICT, caching=True)
    for i in range(4):
        s.submit(f"r{i}", prompt(17, i), max_tokens=40, ignore_eos=True)
    s.run()
    assert s.scheduler.statistics.counts.preemptions > 0
    assert all(s.tokens(f"r{i}") == s.expected(f"r{i}") for i in range(4))
    s.assert_empty()


def test_tenants_share_nothing() -> None:
    s = serving()
    s.submit("a", prompt(40), tenant="a", max_tokens=1)
    s.run()
    for tenant in ("a", "b"):
        s.submit(f"again {tenant}", prompt(40), tenant=tenant, max_tokens=1)
    s.run()
    hits = [s.scheduler.roster.branches(f"again {tenant}")[0].hit_tokens for tenant in ("a", "b")]
    assert hits == [32, 0]


def test_named_blocks_need_not_be_published_twice() -> None:
    found = index()
    found.pool.reserve(0, 4)
    assert found.pool.publish(1, Named(b"k" * 16, None, ""))
    assert found.publish(0, [b"k" * 16], 0, None, "") == []
