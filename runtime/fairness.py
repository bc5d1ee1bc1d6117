"""Who is next: the order of prompts that wait or are under way, and who must give way when memory runs out.

Start-time fair queueing: a request starts with the virtual time of the one served last, and every row it is given moves it back by one, so
short prompts overtake a long one between its chunks and nobody is overtaken for ever. Smaller priority numbers come first; a request that
has waited `max_wait_s` without a row comes before all others, oldest first. docs/runtime.md, 3.3.
"""

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush

from tapeout.runtime.request import Sequence

Urgency = tuple[int, int, float, int]


def urgency(sequence: Sequence, now_s: float, max_wait_s: float) -> Urgency:
    """The sort key of a prompt; the smallest runs first."""
    if sequence.scheduled == 0 and now_s - sequence.submitted_s >= max_wait_s:
        return 0, 0, 0.0, sequence.order
    return 1, sequence.request.params.priority, sequence.tag, sequence.order


class WaitingLine:
    """Waiting sequences. Joining, leaving and looking take logarithmic time; a tag must not change while its sequence waits."""

    def __init__(self, max_wait_s: float) -> None:
        self.max_wait_s = max_wait_s
        self.virtual_time = 0.0
        self._members: dict[Sequence, None] = {}
        # Entries of who has left stay until they come to the front; who joins again finds his own and adds no second one.
        self._fair: list[tuple[int, float, int, Sequence]] = []
        self._oldest: list[tuple[int, Sequence]] = []
        self._tags: dict[Sequence, float] = {}  # of the newest entry of each in `_fair`
        self._aged: set[Sequence] = set()  # who has an entry in `_oldest`

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._members

    def join(self, sequence: Sequence) -> None:
        """Adds a sequence; one that never ran starts at the virtual time."""
        if sequence.preemptions == 0:
            sequence.tag = max(sequence.tag, self.virtual_time)
        self._members[sequence] = None
        if self._tags.get(sequence) != sequence.tag:
            self._tags[sequence] = sequence.tag
            heappush(self._fair, (sequence.request.params.priority, sequence.tag, sequence.order, sequence))
        if sequence not in self._aged:
            self._aged.add(sequence)
            heappush(self._oldest, (sequence.order, sequence))

    def leave(self, sequence: Sequence) -> None:
        """Takes a sequence out. Nothing happens for one that does not wait."""
        self._members.pop(sequence, None)

    def first(self, now_s: float) -> Sequence | None:
        """The sequence to be served next."""
        while self._oldest and self._oldest[0][1] not in self._members:
            self._aged.discard(heappop(self._oldest)[1])
        while self._fair and (self._fair[0][3] not in self._members or self._fair[0][1] != self._fair[0][3].tag):
            _, tag, _, gone = heappop(self._fair)
            if self._tags.get(gone) == tag:
                del self._tags[gone]
        if self._oldest and now_s - self._oldest[0][1].submitted_s >= self.max_wait_s:
            return self._oldest[0][1]
        return self._fair[0][3] if self._fair else None

    def served(self, sequence: Sequence, rows: int) -> None:
        """Moves the virtual time to the sequence, and the sequence back by its rows."""
        self.virtual_time = max(self.virtual_time, sequence.tag)
        sequence.tag += rows


def victim(running: Iterable[tuple[Sequence, int]], step: int, min_run_steps: int) -> Sequence | None:
    """Who gives way, of (sequence, rows that computing it again would take): of the least urgent priority, one that has run for a while since
    it was computed last, the cheapest, of equals the youngest. None if nobody runs.

    So the dearest of those that have not got anywhere yet is never chosen, and gets there.
    """

    def order(candidate: tuple[Sequence, int]) -> tuple[int, bool, int, int]:
        sequence, rows = candidate
        is_fresh = sequence.preemptions > 0 and (sequence.scheduled < sequence.target or step - sequence.resumed_step < min_run_steps)
        return -sequence.request.params.priority, is_fresh, rows, -sequence.order

    return min(running, key=order, default=(None, 0))[0]
