"""What is open here of a key that was revoked, or of an organisation that was suspended, ends within a second.

New requests of theirs are refused by the gate and by admission's own script; what runs is also told by its worker. This
ends what only a gateway has: streams that wait or are read, and sockets, busy or not, each in its API's words.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from core.errors import ForebayError, KeyRevoked, OrganisationSuspended
from core.limits.stopped import ORG, field_of, stopped
from core.redis import AWAY, RedisError, Store
from core.telemetry import logs, metrics
from web.stream import Stream
from web.subscriber import Subscriber
from web.transports.sockets import Sockets

log = logs.get(__name__)

#: How often a gateway looks, seconds. What it finds has ended a moment later: within a second of the command.
LOOK_S = 0.5


class Stopping:
    """Looks after all that is open in one gateway process, with one exchange for each organisation."""

    def __init__(self, store: Store, subscriber: Subscriber, sockets: Sockets) -> None:
        """`store`: the one that limits are in."""
        self.store, self.subscriber, self.sockets = store, subscriber, sockets
        self._closed = False

    def start(self) -> None:
        threading.Thread(target=self._forever, name="stopping", daemon=True).start()

    def stop(self) -> None:
        self._closed = True

    def _forever(self) -> None:
        while not self._closed:
            time.sleep(LOOK_S)
            try:
                self.look()
            except (*AWAY, RedisError) as e:
                log.warning("stopped_not_seen", error=repr(e))
            except Exception:  # a fault of ours; without this loop a revoked key would read on
                log.exception("loop_failed", loop="stopping")
                metrics.loops_failed.labels("stopping").inc()

    def look(self) -> None:
        """Ask after everybody who has something open here, and end what may not go on.

        Raises:
          AWAY: the store is; everything goes on until the next look.
        """
        streams = [
            stream for stream in [*self.subscriber.streams.values(), *self.subscriber.followed] if not stream.over
        ]
        asked = self._open(streams)
        told = self.store.run_all([stopped(org_id, list(key_ids)) for org_id, key_ids in asked.items()])
        found = {org_id: one for org_id, one in zip(asked, told, strict=True) if one}
        # Those that wait go first, or one might begin where another has just ended.
        for stream in sorted(streams, key=lambda stream: bool(stream.tokens)) if found else ():
            self._look_at(stream, found.get(stream.request.caller.org_id, {}))
        for socket in self.sockets if found else ():
            if error := _error(found.get(socket.caller.org_id, {}), socket.caller.key_id):
                socket.stop(error)

    def _open(self, streams: list[Stream]) -> dict[str, dict[str, None]]:
        """Organisation -> its keys that have something open, in order."""
        found: dict[str, dict[str, None]] = {}
        for stream in streams:
            caller = stream.request.caller
            found.setdefault(caller.org_id, {}).update({caller.key_id: None, stream.reader: None})
        for socket in self.sockets:
            found.setdefault(socket.caller.org_id, {})[socket.caller.key_id] = None
        return found

    def _look_at(self, stream: Stream, told: Mapping[str, str]) -> None:
        """What a stopped key has asked for is cancelled; what it only reads goes on without it."""
        if error := _error(told, stream.request.caller.key_id):
            log.info("stream_stopped", request_id=stream.request.id, code=error.error_code)
            self.subscriber.cut_off(stream, error)
        elif error := _error(told, stream.reader):
            stream.break_off(error)


def _error(told: Mapping[str, str], key_id: str) -> ForebayError | None:
    if ORG in told:
        return OrganisationSuspended()
    return KeyRevoked() if field_of(key_id) in told else None
