"""The token stream between workers and gateways: channels, each worker's step log, and what was saved of each output.

| key                     | type    | ttl         | writer                       | reader           | holds          |
|-------------------------|---------|-------------|------------------------------|------------------|----------------|
| f1:{model}:gateway:<id> | channel | -           | workers, the queue's lua     | that gateway     | Frame          |
| f1:{model}:log:<worker> | STREAM  | LOG_MS      | that worker, every step      | a request's next | a Frame for    |
|                         |         |             |                              | worker; web      | each gateway   |
| f1:{model}:output:<id>  | LIST    | RUNNING_MS; | its worker: every few beats, | the same         | Delta, many    |
|                         |         | OUTPUT_MS   | on taking over, at the end   |                  | steps in one   |
|                         |         | from its end|                              |                  |                |

Promise   a delta is in its worker's log before it is published, so whoever reads saved output and logs has at least
          what any gateway relayed. Saved output and the log are merged by (attempt, offset): a repeat changes nothing,
          and an older attempt's late write is not taken. A save lets the log be cut, so it stays a few beats long.
Dies      gateway: its requests' deltas are logged all the same; another attaches and reads. Worker: the next one reads
          what it left. Store: steps wait in the worker, in order, within its buffer (workers/generate.py); what the
          store itself lost, a gateway that relayed it puts back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from core.redis import Call, command, tag
from core.stream.frames import Delta, Frame, Output, decode

__all__ = [
    "LOG_MS",
    "OUTPUT_MS",
    "Output",
    "RUNNING_MS",
    "cut_log",
    "erase",
    "gateway_channel",
    "log_step",
    "logged",
    "publish",
    "save",
    "saved",
]

#: How long a log outlives its worker's last save, ms.
LOG_MS = 15 * 60 * 1000
#: How long saved output outlives its last save while the request runs or waits, ms.
RUNNING_MS = 24 * 3600 * 1000
#: How long it outlives the request's end, ms: so long can its stream be shown again.
OUTPUT_MS = 15 * 60 * 1000

_delta_encoder = msgspec.msgpack.Encoder()
_delta_decoder = msgspec.msgpack.Decoder(Delta)


def gateway_channel(model: str, gateway: str) -> str:
    return f"{tag(model)}gateway:{gateway}"


def publish(model: str, gateway: str, frame: bytes) -> Call[bool]:
    """Send a frame. False: nobody listens there now."""
    return command("PUBLISH", gateway_channel(model, gateway), frame, reply=bool)


# --- the step log


def log_step(model: str, worker: str, frames: Sequence[bytes]) -> Call[bytes]:
    """Put a step's frames into the worker's log; the entry's id. Sent before the frames are published."""
    words = (word for n, frame in enumerate(frames) for word in (n, frame))
    return command("XADD", _log(model, worker), "*", *words, reply=bytes)


def cut_log(model: str, worker: str, entry: bytes) -> list[Call[Any]]:
    """Everything before this entry is saved. The log lives LOG_MS longer."""
    key = _log(model, worker)
    trim = command("XTRIM", key, "MINID", entry, reply=int)
    return [trim, command("PEXPIRE", key, LOG_MS, reply=int)]


def logged(model: str, worker: str) -> Call[list[Frame]]:
    """The frames in a worker's log, in order."""
    return command("XRANGE", _log(model, worker), "-", "+", reply=_frames)


def _log(model: str, worker: str) -> str:
    return f"{tag(model)}log:{worker}"


def _frames(raw: Any) -> list[Frame]:
    return [decode(frame) for _, fields in raw or [] for frame in fields.values()]


# --- saved output


def save(model: str, *deltas: Delta, ended: bool = False) -> list[Call[Any]]:
    """Add to what is saved of one request's output, all of it or nothing."""
    key = _output(model, deltas[0].id)
    push = command("RPUSH", key, *map(_delta_encoder.encode, deltas), reply=int)
    return [push, command("PEXPIRE", key, OUTPUT_MS if ended else RUNNING_MS, reply=int)]


def saved(model: str, request_id: str) -> Call[list[Delta]]:
    """What is saved of a request's output, in order; empty when it is forgotten, too."""
    return command(
        "LRANGE", _output(model, request_id), 0, -1, reply=lambda raw: [_delta_decoder.decode(o) for o in raw]
    )


def erase(model: str, request_id: str) -> Call[bool]:
    """Forget what is saved of a request's output."""
    return command("DEL", _output(model, request_id), reply=bool)


def _output(model: str, request_id: str) -> str:
    return f"{tag(model)}output:{request_id}"
