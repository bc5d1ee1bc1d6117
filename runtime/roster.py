"""All requests, where each stands and what it holds: the one owner of slots and blocks.

Sequences enter through `add`, get memory through `admit` and `fork`, lose it through `_release`, and leave through `finish`, which reports
each request exactly once. Every way out (stop, abort, deadline, failure, preemption) goes through the same release. docs/runtime.md, 1.1.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from tapeout.runtime.blocks import BlockPool
from tapeout.runtime.columns import Columns
from tapeout.runtime.errors import PromptRefused, RequestTaken
from tapeout.runtime.fairness import WaitingLine
from tapeout.runtime.params import branch_seed
from tapeout.runtime.prefix import Hit, PrefixIndex
from tapeout.runtime.request import Event, FinishedEvent, Request, RequestOutput, Status, output_of
from tapeout.runtime.request import Sequence as Branch
from tapeout.runtime.state import SlotPool
from tapeout.runtime.stats import Statistics
from tapeout.runtime.step import Restore, Save
from tapeout.runtime.text import Detokenizer, StopText
from tapeout.runtime.trace import Recorder


@dataclass(slots=True)
class Chores:
    """What the device must do before the rows of the next step."""

    block_copies: list[tuple[int, int]] = field(default_factory=list)
    slot_copies: list[tuple[int, int]] = field(default_factory=list)
    loads: list[tuple[int, bytes]] = field(default_factory=list)
    restores: list[Restore] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)  # of states as they are before anything else


class Roster:
    """Requests by id, waiting and running sequences, and their memory. Not thread safe."""

    def __init__(self, pool: BlockPool, slots: SlotPool, columns: Columns, prefix: PrefixIndex | None, max_wait_s: float,
                 clock: Callable[[], float], statistics: Statistics, recorder: Recorder | None) -> None:  # fmt: skip
        self.pool, self.slots, self.columns, self.prefix = pool, slots, columns, prefix
        self.clock, self.statistics, self.recorder = clock, statistics, recorder
        self.detokenizer: Detokenizer | None = None
        self.read_block: Callable[[int], bytes | None] | None = None
        self.max_context = 0
        self.drafts = 0
        self.copy_slack: int | None = None
        self.waiting = WaitingLine(max_wait_s)
        self.prefilling: dict[int, Branch] = {}  # by slot, prompts that have rows to schedule
        self.decoding: dict[int, Branch] = {}  # by slot, those whose last piece is scheduled
        self.by_slot: list[Branch | None] = [None] * slots.count
        self.tenants: Counter[str] = Counter()  # running sequences
        self.chores = Chores()
        self.events: list[Event] = []
        self._branches: dict[str, list[Branch]] = {}
        self._deadlines: list[tuple[float, int, str]] = []  # when, of whom by order and id: an id may come again
        self._orders = 0

    # -- in

    def add(self, request: Request, status: Status = Status.WAITING) -> None:
        """Takes a request in. Raises RequestTaken. Branches beyond the first wait until the prompt is in the cache."""
        if request.id in self._branches:
            raise RequestTaken(f"request {request.id}", "the id of another request")
        now, params = self.clock(), request.params
        branches = [self._branch(request, i, now) for i in range(params.n)]
        self._branches[request.id] = branches
        self.statistics.counts.submitted += 1
        if params.deadline_ms is not None:
            heappush(self._deadlines, (now + params.deadline_ms / 1e3, branches[0].order, request.id))
        if self.recorder is not None:
            self.recorder.arrived(request.id, now, len(request.prompt))
        if len(request.prompt) > self.max_context:
            reason = PromptRefused(f"request {request.id}", f"{len(request.prompt)} tokens", f"at most {self.max_context}, the context",
                                   remedy="shorten the prompt")  # fmt: skip
            self.finish_all(request.id, Status.PROMPT_TOO_LONG, str(reason))
        elif status is Status.PREPARING:
            for branch in branches:
                branch.status = Status.PREPARING
        else:
            self.waiting.join(branches[0])

    def _branch(self, request: Request, index: int, now: float) -> Branch:
        own = request if index == 0 else Request(request.id, request.prompt, request.params, branch_seed(request.seed, index), index,
                                                 request.images, request.tenant)  # fmt: skip
        branch = Branch(own, list(request.prompt), now, target=len(request.prompt), order=self._orders)
        self._orders += 1
        if self.detokenizer is not None and request.params.stop:
            branch.text = StopText(self.detokenizer(), request.params.stop)
        return branch

    def ready(self, request_id: str) -> bool:
        """Says that all parts of a preparing request are there: it may run. False if it does not wait for that."""
        branches = self._branches.get(request_id, [])
        if not branches or branches[0].status is not Status.PREPARING:
            return False
        for branch in branches:
            branch.status = Status.WAITING
        self.waiting.join(branches[0])
        return True

    def branches(self, request_id: str) -> Sequence[Branch]:
        """The branches of a request. Raises KeyError."""
        return self._branches[request_id]

    @property
    def requests(self) -> Sequence[str]:
        """Ids of all requests that nobody has taken yet."""
        return tuple(self._branches)

    # -- memory

    def admit(self, branch: Branch, hit: Hit | None, now: float) -> None:
        """Gives a waiting sequence its slot, the blocks it shares, and a promise of those for the rest of its prompt."""
        slot = self.slots.take()
        self.waiting.leave(branch)
        self._seat(branch, slot, now)
        if hit is not None:
            branch.shared_end = hit.known
            self.pool.adopt(slot, hit.blocks)
            branch.replay, branch.lineage = hit.plan, hit.lineage
            branch.computed = branch.scheduled = hit.plan.first_row
            self.columns.named[slot] = hit.tokens // self.pool.block_tokens
            if branch.preemptions == 0:
                branch.hit_tokens = hit.tokens
            branch.replayed += hit.plan.replayed_rows
            self.statistics.counts.hit_tokens += hit.tokens
            self.statistics.counts.replayed_rows += hit.plan.replayed_rows
        self.pool.promise(slot, branch.target)
        if branch.preemptions:
            self.statistics.counts.recomputed_rows += branch.target - branch.scheduled

    def _seat(self, branch: Branch, slot: int, now: float) -> None:
        branch.slot, branch.status = slot, Status.RUNNING
        if branch.started_s is None:
            branch.started_s = now
            self.statistics.queue_ms.observe((now - branch.submitted_s) * 1e3)
        self.by_slot[slot] = branch
        self.columns.start(slot, branch, self.max_context, self.drafts)
        self.prefilling[slot] = branch
        self.tenants[branch.request.tenant] += 1
        if self.recorder is not None:
            self.recorder.scheduled(branch.request.id, branch.request.branch, now, slot, branch.preemptions)

    def fork(self, parent: Branch) -> None:
        """Starts the other branches of a request whose prompt is in the cache: beside the first if there is room, else they wait."""
        for child in self._branches[parent.request.id][1:]:
            if child.status is not Status.WAITING or child.slot is not None or child in self.waiting:
                continue
            shared = parent.target - 1  # the prompt's last row runs again: it draws the branch's own first token
            partial = shared % self.pool.block_tokens != 0
            needed = self.pool.blocks_for(parent.target) - shared // self.pool.block_tokens
            is_room = len(self.slots) > 0 and self.pool.unpromised_blocks >= max(needed, partial)
            if parent.slot is None or not is_room or not self._may_copy(parent.slot):
                self.waiting.join(child)
                continue
            slot = self.slots.take()
            self._seat(child, slot, self.clock())
            self.chores.block_copies += self.pool.fork(parent.slot, slot, shared)
            self.chores.slot_copies.append((parent.slot, slot))
            self.pool.promise(slot, child.target)
            child.computed = child.scheduled = shared
            child.replay, child.lineage, child.keys = parent.replay, parent.lineage, list(parent.keys)
            self.columns.named[slot] = shared // self.pool.block_tokens
            self.columns.capacity[slot] = self.pool.held_count(slot) * self.pool.block_tokens

    def _may_copy(self, slot: int) -> bool:
        """Says whether rows in flight leave the last window of a slot's ring intact."""
        return self.copy_slack is not None and int(self.columns.pending[slot]) <= self.copy_slack

    def preempt(self, branch: Branch) -> None:
        """Takes everything from a running sequence and lets it wait: it will compute prompt and output again, but for what stays cached."""
        self._release(branch)
        branch.status, branch.target = Status.WAITING, len(branch.tokens)
        branch.computed = branch.scheduled = 0
        branch.preemptions += 1
        self.statistics.counts.preemptions += 1
        self.waiting.join(branch)
        if self.recorder is not None:
            self.recorder.preempted(branch.request.id, branch.request.branch, self.clock())

    def _release(self, branch: Branch) -> None:
        slot = branch.slot
        if slot is None:
            return
        self.pool.release(slot)
        self.columns.end(slot)
        self.prefilling.pop(slot, None)
        self.decoding.pop(slot, None)
        self.by_slot[slot] = None
        self.tenants[branch.request.tenant] -= 1
        branch.slot = None
        self.slots.give(slot)

    # -- out

    def finish(self, branch: Branch, status: Status, stop_reason: str | int | None = None, error: str | None = None) -> None:
        """Ends one branch, whatever it holds; the request's terminal event follows its last branch. Nothing happens a second time."""
        if branch.status.is_finished:
            return
        self.waiting.leave(branch)
        self._release(branch)
        branch.status, branch.stop_reason, branch.error, branch.finished_s = status, stop_reason, error, self.clock()
        name = branch.request.id
        self.statistics.finished(branch)
        if self._has_ended(name):
            self._report(name)

    def finish_all(self, request_id: str, status: Status, error: str | None = None) -> bool:
        """Ends all branches of a request that have not ended. False if there are none."""
        open_branches = [branch for branch in self._branches.get(request_id, ()) if not branch.status.is_finished]
        for branch in open_branches:
            self.finish(branch, status, None, error)
        return bool(open_branches)

    def _has_ended(self, name: str) -> bool:
        return all(branch.status.is_finished for branch in self._branches[name])

    def _report(self, name: str) -> None:
        branches = self._branches[name]
        first, held = branches[0], [branch.text.finish() for branch in branches if branch.text is not None]
        self.events.append(FinishedEvent(name, first.status.value, first.stop_reason, held[0] if len(branches) == 1 and held else ""))
        self.statistics.counts.requests_finished[first.status.value] += 1
        if self.recorder is not None:
            self.recorder.finished(name, self.clock(), first.status.value, sum(b.emitted for b in branches))

    def expire(self, now: float) -> None:
        """Ends requests whose deadline has passed."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, order, name = heappop(self._deadlines)
            if name in self._branches and self._branches[name][0].order == order:
                self.finish_all(name, Status.DEADLINE)

    def take(self, request_id: str, prompt: str | None = None, text: str = "") -> RequestOutput:
        """Returns the result of a finished request and forgets it. Raises KeyError for one that is unknown or not finished."""
        if not self._has_ended(request_id):
            raise KeyError(request_id)
        return output_of(self._branches.pop(request_id), prompt, text)

    def forget(self, *request_ids: str) -> None:
        """Drops finished requests and what is still to be reported of them. Nothing happens for any other."""
        gone = {name for name in request_ids if name in self._branches and self._has_ended(name)}
        for name in gone:
            del self._branches[name]
        self.events = [event for event in self.events if event.request_id not in gone]

    # -- checking

    def put_right(self) -> None:
        """While no sequence runs, none has a slot and none counts: an interrupt may have stopped one on its way."""
        if not self.prefilling and not self.decoding and all(b.slot is None for branches in self._branches.values() for b in branches):
            self.slots.give_others()
            self.tenants.clear()

    def faults(self) -> list[str]:
        """Broken rules between requests and memory; an empty list is the only right answer."""
        found = self.pool.faults()
        seated = {slot for slot, branch in enumerate(self.by_slot) if branch is not None}
        if seated != set(self.prefilling) | set(self.decoding) or set(self.prefilling) & set(self.decoding):
            found.append("a slot is under way twice, or not at all")
        for slot in seated:
            branch = self.by_slot[slot]
            if branch is None or branch.slot != slot or branch.status is not Status.RUNNING or slot in self.slots:
                found.append(f"slot {slot} and its sequence do not agree")
            elif not self._is_covered(branch, slot):
                found.append(f"slot {slot} holds {self.pool.held_count(slot)} blocks for {self.columns.length[slot]} tokens")
        if any(branch.slot is not None or branch.status is not Status.WAITING for branch in self.waiting):
            found.append("a waiting sequence holds something")
        return found

    def _is_covered(self, branch: Branch, slot: int) -> bool:
        """Blocks cover what is computed or in flight, and not more than that, what may be verified, and shared blocks."""
        pool, columns = self.pool, self.columns
        if slot in self.prefilling:
            is_shared = branch.scheduled < int(columns.named[slot]) * pool.block_tokens
            return is_shared or pool.held_count(slot) >= pool.blocks_for(branch.scheduled)
        most = int(columns.length[slot] + columns.pending[slot]) + 2 * (1 + self.drafts)
        return pool.blocks_for(int(columns.length[slot]) - 1) <= pool.held_count(slot) <= pool.blocks_for(most)
