"""The channels of the token stream, and the worker's end of them.

| name                    | type    | writer               | reader                    | holds                      |
|-------------------------|---------|----------------------|---------------------------|----------------------------|
| f1:{model}:gateway:<id> | channel | workers; endings.lua | that gateway's subscriber | Frame (core/stream/frames) |

Promise   a gateway gets a request's deltas in order of their offsets, and its ending after them. Pub/sub keeps
          nothing, so a worker keeps each frame until somebody has received it, within BUFFER_BYTES and `buffer_s`;
          an ending that was lost is found by `watch` (tasks/queue.py).
Dies      gateway: its frames are given up after `buffer_s`, and so are its requests. Worker: what it had published
          counts as delivered. Store: frames wait in the worker until it is back and the gateway listens again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from core.redis import Call, command, tag
from core.stream.frames import Delta, Frame, encode

#: Frames that one worker keeps for one gateway that does not listen.
BUFFER_BYTES = 16 * 2**20


def gateway_channel(model: str, gateway: str) -> str:
    return f"{tag(model)}gateway:{gateway}"


def publish(model: str, gateway: str, frame: bytes) -> Call[bool]:
    """Send a frame. False: nobody listens there now."""
    return command("PUBLISH", gateway_channel(model, gateway), frame, reply=bool)


@dataclass
class Outlet:
    """What is on its way to one gateway, in order."""

    deltas: list[Delta] = field(default_factory=list)  #: of the step that is not over yet
    frames: deque[tuple[float, bytes]] = field(default_factory=deque)  #: (sealed at, frame) not yet received
    size_bytes: int = 0
    requests: set[str] = field(default_factory=set)  #: whose deltas go through here
    sealed: int = 0  #: frames ever sealed
    sent: int = 0  #: frames ever received

    def seal(self, worker: str, now_s: float) -> None:
        """The step is over: its deltas become one frame."""
        if not self.deltas:
            return
        frame = encode(Frame(worker=worker, deltas=tuple(self.deltas)))
        self.deltas.clear()
        self.frames.append((now_s, frame))
        self.size_bytes += len(frame)
        self.sealed += 1

    def received(self) -> None:
        """The oldest frame has arrived."""
        _, frame = self.frames.popleft()
        self.size_bytes -= len(frame)
        self.sent += 1

    @property
    def is_done(self) -> bool:
        """Nothing is in it, and nobody is behind it."""
        return not self.requests and not self.frames and not self.deltas

    def overdue(self, now_s: float, buffer_s: float) -> bool:
        """Nobody has received the oldest frame for too long, or too much waits."""
        return bool(self.frames) and (now_s - self.frames[0][0] > buffer_s or self.size_bytes > BUFFER_BYTES)
