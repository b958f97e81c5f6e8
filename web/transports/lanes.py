"""Whose turn it is on one connection, and what can be gone on from there. Pure.

A lane is a `stream_id`; None is the default one. Requests of a lane are answered in the order they came, one at a time;
lanes are answered side by side. What cannot begin waits: the oldest first whose lane is free.

    RUNNING_MAX        answered at once; more wait and are not refused
    LANES_MAX          names that one connection may give lanes; a further one is refused, the default lane is none
    WAITING_MAX        waiting in all, and WAITING_BYTES_MAX of them: beyond either the client floods, and is sent away
    RECENT_BYTES_MAX   of the conversations that are remembered; beyond it the oldest is forgotten
"""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

Asked = TypeVar("Asked")
Lane = str | None
Conversation = tuple[bytes, ...]  #: turn by turn, each a JSON array of its items
Verdict = Literal["start", "wait", "too many lanes", "flood"]

#: The figures of OpenAI's WebSocket mode.
RUNNING_MAX = 16
LANES_MAX = 32
WAITING_MAX = 64
WAITING_BYTES_MAX = 32 * 2**20
RECENT_BYTES_MAX = 8 * 2**20


class Lanes(Generic[Asked]):
    """What was asked on one connection and is not answered yet."""

    def __init__(
        self,
        *,
        running_max: int = RUNNING_MAX,
        lanes_max: int = LANES_MAX,
        waiting_max: int = WAITING_MAX,
        waiting_bytes_max: int = WAITING_BYTES_MAX,
    ) -> None:
        self.running_max, self.lanes_max = running_max, lanes_max
        self.waiting_max, self.waiting_bytes_max = waiting_max, waiting_bytes_max
        self.running: set[Lane] = set()
        self.waiting: list[tuple[Lane, Asked, int]] = []  #: the oldest first
        self.waiting_bytes = 0
        self._named: set[str] = set()

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    def ask(self, lane: Lane, asked: Asked, size_bytes: int = 0) -> Verdict:
        """Something is asked on a lane. "start": now, by the caller; `done` is to be told when it is answered."""
        if not self._admits(lane):
            return "too many lanes"
        if self._may_start(lane):  # then nobody of it waits, or that one would run
            self._open(lane)
            self.running.add(lane)
            return "start"
        if len(self.waiting) >= self.waiting_max or self.waiting_bytes + size_bytes > self.waiting_bytes_max:
            return "flood"
        self._open(lane)
        self.waiting.append((lane, asked, size_bytes))
        self.waiting_bytes += size_bytes
        return "wait"

    def done(self, lane: Lane) -> list[Asked]:
        """A lane's answer is out. What begins now."""
        self.running.remove(lane)
        begins: list[Asked] = []
        waiting, self.waiting = self.waiting, []
        for waits, asked, size_bytes in waiting:
            if self._may_start(waits):
                self.running.add(waits)
                self.waiting_bytes -= size_bytes
                begins.append(asked)
            else:
                self.waiting.append((waits, asked, size_bytes))
        return begins

    def clear(self) -> None:
        """Nobody waits any more."""
        self.waiting, self.waiting_bytes = [], 0

    def _may_start(self, lane: Lane) -> bool:
        return lane not in self.running and len(self.running) < self.running_max

    def _admits(self, lane: Lane) -> bool:
        return lane is None or lane in self._named or len(self._named) < self.lanes_max

    def _open(self, lane: Lane) -> None:
        if lane is not None:
            self._named.add(lane)


class Recent:
    """The most recent response of each lane with its conversation, so that a turn can go on from it although nothing is
    stored. It ends with the connection."""

    def __init__(self, bytes_max: int = RECENT_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self._kept: dict[Lane, tuple[str, Conversation]] = {}  #: lane -> response, and up to it; the oldest first
        self._stored: set[str] = set()  #: those of them that others can go on from, too

    @property
    def size_bytes(self) -> int:
        return sum(_size(conversation) for _, conversation in self._kept.values())

    def keep(self, lane: Lane, response_id: str, conversation: Conversation, *, stored: bool = False) -> None:
        """A lane's newest. For want of room the oldest is forgotten; one too large by itself is not remembered."""
        self._kept.pop(lane, None)
        if _size(conversation) <= self.bytes_max:
            self._kept[lane] = (response_id, conversation)
        while self.size_bytes > self.bytes_max:
            del self._kept[next(iter(self._kept))]
        self._stored = {kept for kept, _ in self._kept.values() if kept in self._stored}
        if stored and self.find(response_id) is not None:
            self._stored.add(response_id)

    def only_here(self, response_id: str) -> bool:
        """Nobody but this connection knows it."""
        return self.find(response_id) is not None and response_id not in self._stored

    def find(self, response_id: str) -> Conversation | None:
        """The conversation up to and with a response, of whichever lane."""
        found = (conversation for kept, conversation in self._kept.values() if kept == response_id)
        return next(found, None)

    def failed(self, lane: Lane, previous: str) -> None:
        """A turn that went on from `previous` has failed. On its own lane the response is forgotten; another lane
        that forked from it takes nothing away."""
        kept = self._kept.get(lane)
        if kept is not None and kept[0] == previous:
            del self._kept[lane]


def _size(conversation: Conversation) -> int:
    return sum(map(len, conversation))
