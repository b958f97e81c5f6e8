"""What a gateway has open of a key or an organisation that was stopped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from core.errors import ForebayError, KeyRevoked, OrganisationSuspended
from core.limits.stopped import ORG, REVOKED, SUSPENDED, clear, field_of, stop
from core.redis import Call, Store
from core.values import CALLER_STOPPED, Ending, Outcome
from tasks.queue import generation
from tests.conftest import TimedStore
from tests.web.test_sockets import Wire, record, socket_of
from tests.web.test_subscriber import MODEL, request, taken
from web.stopping import Stopping
from web.stream import Broken, Stream
from web.subscriber import Subscriber
from web.transports.sockets import Sockets

STORES = ("single", "cluster")


class Counting(TimedStore):
    """A store that counts what it is asked in one go."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: list[int] = []

    def run_all(self, calls: Any) -> list[Any]:
        self.asked.append(len(calls))
        return super().run_all(calls)


class Here:
    """One gateway with streams and sockets, and the queue they are in."""

    def __init__(self, store: TimedStore) -> None:
        self.store = store
        self.subscriber = Subscriber(store, "", [MODEL], "g")
        self.sockets = Sockets(store)
        self.asking = Counting(store.client, store.time)
        self.stopping = Stopping(self.asking, self.subscriber, self.sockets)

    def open(self, name: str, **asked: Any) -> Stream:
        """A stream of a request that waits in the queue."""
        stream = self.subscriber.open(request(name, **asked))
        self.store.run(self.subscriber.queues[MODEL].enqueue(generation(stream.request, b"")))
        stream.accepted = True
        return stream

    def socket(self, key_id: str, org_id: str = "o") -> Wire:
        wire = Wire()
        self.sockets._open.add(socket_of(wire, record(key_id, org_id=org_id)))
        return wire

    def state(self, name: str) -> str:
        seen = self.store.run(self.subscriber.queues[MODEL].peek(name))
        return seen.ending.outcome if seen.ending else seen.state


@pytest.fixture
def here(store: TimedStore) -> Here:
    return Here(store)


def told(stream: Stream) -> ForebayError | None:
    """The error that its reader was told last."""
    broken = [event for event in taken(stream) if isinstance(event, Broken)]
    assert len(broken) <= 1
    return broken[0].error if broken else None


def test_a_revoked_keys_streams_end_and_leave_the_queue_and_nobody_elses(here: Here) -> None:
    gone, whole = here.open("r1", key="k1", stream=True), here.open("r2", key="k1", stream=False)
    other, foreign = here.open("r3", key="k2"), here.open("r4", key="k1", org="another")
    here.stopping.look()
    assert not any(stream.over for stream in (gone, whole, other, foreign))

    here.store.run(stop("o", field_of("k1"), REVOKED))
    here.stopping.look()

    assert [type(told(stream)) for stream in (gone, whole, other, foreign)] == [
        KeyRevoked, KeyRevoked, type(None), type(None),
    ]  # fmt: skip
    assert [here.state(f"r{n}") for n in range(1, 5)] == ["cancelled", "cancelled", "waiting", "waiting"]


def test_a_suspended_organisations_streams_end_until_it_goes_on(here: Here) -> None:
    stream = here.open("r1")
    here.store.run(stop("o", ORG, SUSPENDED))
    here.stopping.look()
    assert isinstance(told(stream), OrganisationSuspended)

    here.store.run(clear("o"))
    again = here.open("r2")
    here.stopping.look()
    assert told(again) is None and here.state("r2") == "waiting"


def test_one_that_lingers_for_its_reader_is_cancelled_too(here: Here) -> None:
    stream = here.open("r1", linger_ms=60_000)
    here.subscriber.close(stream)
    here.store.run(stop("o", field_of("k"), REVOKED))
    here.stopping.look()

    assert here.state("r1") == "cancelled" and not here.subscriber.streams


def test_a_reader_that_was_revoked_goes_and_what_another_key_asked_for_goes_on(here: Here) -> None:
    """A response is its project's: any key of it may read."""
    stream = here.open("r1", key="k1")
    stream.reader = "k2"
    here.store.run(stop("o", field_of("k2"), REVOKED))
    here.stopping.look()

    assert isinstance(told(stream), KeyRevoked) and here.state("r1") == "waiting"


def test_one_that_is_open_elsewhere_and_read_here_ends(here: Here) -> None:
    stream = here.open("r1")
    del here.subscriber.streams["r1"]
    here.subscriber.followed.add(stream)
    here.store.run(stop("o", field_of("k"), REVOKED))
    here.stopping.look()

    assert isinstance(told(stream), KeyRevoked) and here.state("r1") == "cancelled"


@pytest.mark.parametrize(("why", "error"), [("revoked", KeyRevoked), ("suspended", OrganisationSuspended)])
def test_a_worker_that_is_quicker_says_the_same(here: Here, why: str, error: type[ForebayError]) -> None:
    """Its ending says why, and its reader is told as by this gateway; it has ended, so nothing is cancelled."""
    stream = here.open("r1")
    message = CALLER_STOPPED[why]
    stream.end(Ending(id="r1", attempt=0, outcome=Outcome.CANCELLED, message=message))

    assert type(told(stream)) is error and stream.ended


def test_sockets_are_told_and_closed_busy_or_not(here: Here) -> None:
    revoked, suspended, good = here.socket("k1"), here.socket("k1", "bad"), here.socket("k2")
    here.store.run_all([stop("o", field_of("k1"), REVOKED), stop("bad", ORG, SUSPENDED)])
    here.stopping.look()

    for wire, status, code in ((revoked, 401, "key_revoked"), (suspended, 403, "organisation_suspended")):
        said = wire.sent.get(timeout=5)
        assert (said["type"], said["status"], said["error"]["code"]) == ("error", status, code)
        assert wire.codes.get(timeout=5) == 1008 and wire.sent.empty()
    assert good.codes.empty() and good.sent.empty()


def test_a_socket_whose_client_takes_nothing_is_closed_by_the_next_look(here: Here) -> None:
    wire = here.socket("k1")
    [socket] = here.sockets
    socket._running["lane"] = SimpleNamespace(break_off=lambda error: None)  # type: ignore[assignment]
    here.store.run(stop("o", field_of("k1"), REVOKED))
    here.stopping.look()
    socket._leave = lambda: None  # type: ignore[method-assign]  # its lane is none that could be left
    assert wire.codes.empty()

    here.stopping.look()
    assert wire.codes.get(timeout=5) == 1008


def test_a_look_costs_one_exchange_an_organisation_and_none_where_nothing_is_open(here: Here) -> None:
    here.stopping.look()
    for n in range(6):
        here.open(f"r{n}", key=f"k{n}", org=f"o{n % 2}")
    here.socket("k9", "o1")
    here.stopping.look()

    assert here.asking.asked == [0, 2]


def test_without_the_store_everything_goes_on_until_it_is_back(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = here.open("r1")
    here.store.run(stop("o", field_of("k"), REVOKED))

    def away(store: Store, calls: list[Call[Any]]) -> None:
        raise ConnectionError("away")

    with monkeypatch.context() as patched:
        patched.setattr(Counting, "run_all", away)
        with pytest.raises(ConnectionError):
            here.stopping.look()
    assert not stream.over
    here.stopping.look()
    assert isinstance(told(stream), KeyRevoked)
