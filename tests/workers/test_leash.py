"""The leash on the scripted engine, with holds and money in a real Valkey."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import redis
from structlog.testing import capture_logs

from core.catalog import EngineKnobs
from core.limits import stopped
from core.limits.balances import Figures, account, open_lease
from core.limits.balances import key as money_key
from core.limits.counters import Need, Reserved, Terms, reserve, used
from core.redis import AsyncStore, Call
from core.telemetry import metrics
from core.values import Limit, Outcome, Request, Usage
from tasks.runner import Held
from tests.conftest import on_loop
from tests.workers.test_generate import Gateway, Worker, request
from workers.engine import Piece
from workers.generate import _Answer
from workers.leash import BEAT_S, UNBOUND, Lead, Leash, MoneySpent, Purse
from workers.resume import said_until
from workers.scripted import scripted_tokens

#: What a token of output costs, in units of money; input costs nothing here.
TOKEN = 100
PREPAID = Limit(scope="org", prepaid=True)
KEY = Limit(scope="key:k")


class Purses(Worker):
    """A worker whose limits loop runs, and admission seen from the side."""

    async def __aenter__(self) -> Purses:
        await super().__aenter__()
        self.background.append(asyncio.create_task(self.leash.run()))
        return self

    def grant(self, tokens: int) -> None:
        """The organisation has money for so many tokens."""
        self.side.run(open_lease("o", "org", Figures(lease=1, granted=tokens * TOKEN, grants=1)))

    def more(self, tokens: int) -> None:
        """It has so much more by now."""
        self.valkey.hincrby(money_key("o", "org"), "granted", tokens * TOKEN)

    @property
    def valkey(self) -> Any:
        return self.side.client

    def admit(self, one: Request, *limits: Limit, hold: int | None = None) -> Request:
        """As a gateway does: the request under its limits, on the queue."""
        limits = limits if limits[:1] and limits[0].scope == KEY.scope else (KEY, *limits)
        most = one.width * one.sampling.max_tokens if one.task == "generate" else 0
        hold = most if hold is None else hold
        need = Need(input_tokens=one.input_tokens, output_tokens=hold, least_output_tokens=hold)
        terms = Terms(prices=(0, 0, TOKEN * 10**6))
        got = self.side.run(reserve("o", one.id, "k", one.model, limits, need, terms))
        assert isinstance(got, Reserved)
        scopes = tuple(limit.scope for limit in limits)
        one = msgspec.structs.replace(one, scopes=scopes, allowance_tokens=got.allowance_tokens)
        self.send(one)
        return one

    def money(self) -> tuple[int, int]:
        """(spent, held), in tokens."""
        found = self.side.run(account("o", "org"))
        assert found is not None
        return found.spent // TOKEN, found.held // TOKEN


@pytest.fixture
def worker(valkey_url: str, valkey: redis.Redis) -> Iterator[Purses]:
    worker = Purses(valkey_url)
    yield worker
    worker.side.close()


def text(seed: int, tokens: int) -> str:
    return bytes(scripted_tokens(seed, tokens)).decode()


# --- money


@on_loop
async def test_money_for_so_many_tokens_ends_a_stream_at_that_token(worker: Purses) -> None:
    worker.grant(17)
    async with Gateway(worker.url) as gateway, worker.make():
        asked = worker.admit(request("a", n=200, seed=3), PREPAID)
        ending = await gateway.ending("a")

    assert asked.allowance_tokens == 17
    assert gateway.tokens("a") == scripted_tokens(3, 17) and gateway.text("a") == text(3, 17)
    assert (ending.outcome, ending.usage) == (Outcome.STOPPED, Usage(input_tokens=3, output_tokens=17))
    assert ending.message == "its money is used up" and worker.money() == (17, 0)


@on_loop
async def test_money_that_comes_meanwhile_goes_on(worker: Purses) -> None:
    """At the tenth token the worker asks at once, and learns that there is more."""
    worker.grant(10)
    async with Gateway(worker.url) as gateway, worker.make(step_ms=10):
        worker.admit(request("a", n=30, seed=3), PREPAID)
        worker.more(100)
        ending = await gateway.ending("a")

    assert ending.outcome == Outcome.LENGTH and gateway.tokens("a") == scripted_tokens(3, 30)
    assert sum(worker.money()) == 30  # spent, and held: the gateway settles it


@on_loop
async def test_it_ends_inside_a_piece_of_several_tokens(worker: Purses, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what one step gave, only what is paid for leaves the worker, as tokens and as text."""
    worker.grant(10)
    async with Gateway(worker.url) as gateway, worker.make():
        in_sevens(worker, monkeypatch)
        worker.admit(request("a", n=50, seed=3), PREPAID)
        ending = await gateway.ending("a")

    assert gateway.tokens("a") == scripted_tokens(3, 10) and gateway.text("a") == text(3, 10)
    assert (ending.outcome, ending.usage.output_tokens) == (Outcome.STOPPED, 10)


@on_loop
async def test_several_answers_share_it_and_end_together(worker: Purses) -> None:
    worker.grant(25)
    async with Gateway(worker.url) as gateway, worker.make():
        worker.admit(msgspec.structs.replace(request("a", n=100, seed=3), n=3), PREPAID)
        ending = await gateway.ending("a")
        assert worker.engine.stats().running == 0

    assert len(gateway.tokens("a")) == 25 == ending.usage.output_tokens and ending.outcome == Outcome.STOPPED
    for choice in range(3):
        shown = gateway.text("a", f"{choice}/text")
        assert 7 <= len(shown) <= 9 and shown == text(3 + choice, len(shown))


@on_loop
async def test_a_second_attempt_goes_on_with_the_same_money(worker: Purses) -> None:
    """Its first worker dies; what was put until then is not paid twice, and it ends at the same token."""
    worker.grant(40)
    async with Gateway(worker.url) as gateway:
        first = await worker.make("w1", step_ms=10).__aenter__()
        worker.admit(request("a", n=200, seed=3, temperature=0), PREPAID)
        await gateway.until(lambda: len(gateway.tokens("a")) >= 12)
        await first.die()
        second = Purses(worker.url).make("w2")
        async with second:
            ending = await gateway.ending("a")
            cut = min(delta.offset for delta in gateway.deltas("a") if delta.attempt == 2)
        second.side.close()
        await first._close()

    assert cut >= 12 and ending.attempt == 2
    assert len(gateway.tokens("a")) == 40 == ending.usage.output_tokens and ending.outcome == Outcome.STOPPED
    assert worker.money() == (40, 0)


@on_loop
async def test_an_attempt_without_money_left_asks_its_engine_nothing(worker: Purses) -> None:
    """All was put before the first worker died: the second ends it, and whoever follows has it whole."""
    worker.grant(12)
    async with Gateway(worker.url) as gateway:
        first = await worker.make("w1").__aenter__()
        first.limits.away.add("all")  # it waits at the end of its money
        worker.admit(request("a", n=200, seed=3, temperature=0), PREPAID)
        await gateway.until(lambda: len(gateway.tokens("a")) == 12)
        await first.die()
        second = Purses(worker.url).make("w2")
        async with second:
            ending = await gateway.ending("a")
            assert second.steps <= 1  # the step that the ending itself tells
        second.side.close()
        await first._close()

    assert (ending.outcome, ending.usage.output_tokens, ending.attempt) == (Outcome.STOPPED, 12, 2)
    assert gateway.deltas("a")[-1].attempt == 2 and len(gateway.tokens("a")) == 12


@on_loop
async def test_what_a_stop_string_held_back_is_shown_and_nothing_behind(worker: Purses) -> None:
    """The engine holds back the last characters, in which a stop string might begin; they are paid for."""
    worker.grant(9)
    async with Gateway(worker.url) as gateway, worker.make():
        worker.admit(request("a", n=50, seed=3, stop=("never said",)), PREPAID)
        ending = await gateway.ending("a")

    assert gateway.text("a") == text(3, 9) and ending.usage.output_tokens == 9


@on_loop
async def test_an_allowance_of_nothing_starts_nothing(worker: Purses) -> None:
    worker.grant(1)
    async with Gateway(worker.url) as gateway, worker.make():
        one = worker.admit(request("b", n=50), PREPAID)
        ending = await gateway.ending("b")
        steps = worker.steps
        worker.send(msgspec.structs.replace(one, id="a", allowance_tokens=0))
        ending = await gateway.ending("a")

    assert (ending.outcome, ending.usage) == (Outcome.STOPPED, Usage())
    assert gateway.tokens("a") == [] and worker.steps - steps <= 1


@on_loop
async def test_a_thought_that_money_ends_is_told_as_thought(worker: Purses) -> None:
    """A reader is between engine and output: what it holds back is of what was paid for."""
    worker.grant(8)
    async with Gateway(worker.url) as gateway, worker.make(engine=EngineKnobs(reasoning_parser="marks")):
        worker.admit(request("a", n=50, seed=3), PREPAID)
        ending = await gateway.ending("a")

    [(kind, thought)] = gateway.said("a")
    assert kind == "reasoning" and len(thought) == 7 and ending.usage.reasoning_tokens == 8


@on_loop
async def test_with_the_store_of_limits_away_it_ends_where_it_last_knew(
    worker: Purses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.leash.PATIENCE_S", 0.4)
    worker.grant(17)
    async with Gateway(worker.url) as gateway, worker.make():
        worker.limits.away.add("all")
        worker.admit(request("a", n=200, seed=3), PREPAID)
        worker.admit(request("free", n=60, seed=4))
        ending = await gateway.ending("a")
        free = await gateway.ending("free")

    assert len(gateway.tokens("a")) == 17 == ending.usage.output_tokens and ending.outcome == Outcome.STOPPED
    assert "could not be asked" in ending.message and free.outcome == Outcome.LENGTH


@on_loop
async def test_who_is_refused_a_report_is_not_told_that_its_money_is_used_up(worker: Purses) -> None:
    """What lies in the store is not what its script can read: there may be money, and nobody can say."""
    worker.grant(17)
    with capture_logs() as logs:
        async with Gateway(worker.url) as gateway, worker.make():
            one = worker.admit(request("a", n=200, seed=3), PREPAID)
            worker.valkey.set(money_key("o", "org"), "no hash")
            other = msgspec.structs.replace(request("b", n=30), caller=msgspec.structs.replace(one.caller, org_id="p"))
            worker.send(other)
            ending, told = await gateway.ending("a"), await gateway.ending("b")

    assert (ending.outcome, ending.usage.output_tokens) == (Outcome.STOPPED, 17) and told.outcome == Outcome.LENGTH
    assert "could not be asked" in ending.message
    assert {line["org_id"] for line in logs if line["event"] == "report_refused"} == {"o"}


@on_loop
async def test_a_store_that_comes_back_in_time_is_asked_then(worker: Purses) -> None:
    worker.grant(17)
    async with Gateway(worker.url) as gateway, worker.make():
        worker.limits.away.add("all")
        worker.admit(request("a", n=30, seed=3), PREPAID)
        await gateway.until(lambda: len(gateway.tokens("a")) == 17)
        worker.more(100)
        worker.limits.away.clear()
        ending = await gateway.ending("a")

    assert ending.outcome == Outcome.LENGTH and gateway.tokens("a") == scripted_tokens(3, 30)


@on_loop
async def test_lost_replies_and_repeats_change_nothing(worker: Purses) -> None:
    worker.grant(17)
    async with Gateway(worker.url) as gateway, worker.make():
        worker.limits.losing["progress"] = 3
        worker.admit(request("a", n=200, seed=3), PREPAID)
        ending = await gateway.ending("a")

    assert len(gateway.tokens("a")) == 17 == ending.usage.output_tokens and worker.money() == (17, 0)


@on_loop
async def test_a_stream_that_nothing_bounds_keeps_no_purse(worker: Purses) -> None:
    async with Gateway(worker.url) as gateway, worker.make():
        worker.admit(request("a", n=30))
        await worker.generated("a", 3)
        [lead] = worker.leash.leads
        ending = await gateway.ending("a")

    assert lead.allowance == UNBOUND and not lead.bound and ending.outcome == Outcome.LENGTH
    assert not worker.leash.leads


# --- who is stopped


@on_loop
async def test_a_revoked_keys_request_ends_with_what_it_made(worker: Purses) -> None:
    async with Gateway(worker.url) as gateway, worker.make(step_ms=5):
        worker.admit(request("a", n=450))
        await worker.generated("a", 5)
        began_s = time.monotonic()
        worker.side.run(stopped.stop("o", "key:k", "revoked"))
        ending = await gateway.ending("a")
        took_s = time.monotonic() - began_s
        assert worker.engine.stats().running == 0

    assert (ending.outcome, ending.message) == (Outcome.CANCELLED, "its key was revoked")
    assert 5 <= ending.usage.output_tokens == len(gateway.tokens("a")) < 450
    assert took_s < BEAT_S + 1


@on_loop
async def test_who_is_stopped_before_it_starts_is_told_beside_its_first_step(worker: Purses) -> None:
    """It was admitted, then waited; its organisation was suspended meanwhile. No beat need come."""
    worker.admit(request("a", n=450))
    worker.side.run(stopped.stop("o", "org", "suspended"))
    async with Gateway(worker.url) as gateway, worker.make(step_ms=50):
        ending = await gateway.ending("a")

    assert (ending.outcome, ending.message) == (Outcome.CANCELLED, "its organisation was suspended")
    assert ending.usage.output_tokens <= 10  # half a second's


# --- what is held


@on_loop
async def test_twenty_slow_answers_do_not_freeze_their_key(worker: Purses) -> None:
    """The model could give 500 tokens a second and gives each 50: they hold what they can make of that, and there is
    room for others in a limit that their admission filled."""
    limit = Limit(scope="key:k", tokens_per_minute=182_000)
    async with worker.make(step_ms=20, context_tokens=10_000, slots=20):
        worker.leash.pace = 500.0
        for n in range(20):
            worker.admit(request(f"r{n}", n=9000), limit, hold=9000)
        [full] = worker.side.run(used("o", [limit]))
        await worker.generated("r19", 150)
        [now] = worker.side.run(used("o", [limit]))

    assert full.left.tokens is not None and full.left.tokens < 9000
    assert now.output_tokens >= 20 * 50 and now.held_tokens < 20 * 4500
    assert now.left.tokens is not None and now.left.tokens > 80_000


@on_loop
async def test_debt_is_counted_and_logged(worker: Purses) -> None:
    """The client named no limit, so little is held; what comes beyond it goes into debt, and nothing is cut."""
    before = metrics.limits_debt_tokens.labels("m")._value.get()
    with capture_logs() as logs:
        async with Gateway(worker.url) as gateway, worker.make(step_ms=5):
            limit = Limit(scope="project:p", tokens_per_minute=30)
            one = msgspec.structs.replace(request("a", n=300), usual_tokens=10)
            worker.admit(one, limit, hold=10)
            ending = await gateway.ending("a")

    made = metrics.limits_debt_tokens.labels("m")._value.get() - before
    assert ending.outcome == Outcome.LENGTH and ending.usage.output_tokens == 300
    [line] = [line for line in logs if line["event"] == "limit_exceeded"]
    assert line["debt_tokens"] == made > 50 and line["request_id"] == "a"


@on_loop
async def test_money_that_another_answer_took_meanwhile_is_asked_for_again() -> None:
    """While one answer waits for its hundred and first token to be covered, the other puts one: that was the last."""
    put: list[tuple[int, ...]] = []
    lead = lead_of(msgspec.structs.replace(request("a", n=200), n=2), 98, 100)
    course = SimpleNamespace(lead=lead, offset=98, cut="", many=True, answers=[], kind=lambda one, what: what)
    course.put = lambda tokens, runs, **rest: put.append(tokens)

    async def covers(tokens: int) -> bool:
        lead.allowance, course.offset = 101, 99
        return tokens <= lead.allowance

    answer = _Answer(lead.request, course, None)  # type: ignore[arg-type]
    answer.purse = Purse(Leash(None, None, 10.0), lead, decoded)  # type: ignore[arg-type]
    answer.purse.covers = covers  # type: ignore[assignment]
    with pytest.raises(MoneySpent):
        await answer.pay(Piece(tokens=(97, 98, 99), text="abc"))

    assert put == [(97, 98)]


# --- reports


class Told(AsyncStore):
    """Takes reports, and answers that all may go on."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    async def run_all(self, calls: Sequence[Call[Any]]) -> list[Any]:
        replies = []
        for call in calls:
            count = len(call.args) // 10
            self.batches.append(count)
            replies.append(call.reply([[1, -1, b"", 0]] * count))
        return replies


class Nobody:
    def __init__(self) -> None:
        self.held: dict[str, Held] = {}


@on_loop
async def test_a_second_of_a_hundred_requests_costs_less_than_two_milliseconds_of_the_loop() -> None:
    """The target is one; a machine that others use is given twice that."""
    store = Told()
    leash = Leash(store, Nobody(), 100.0)  # type: ignore[arg-type]
    for n in range(100):
        lead = leash.follow(msgspec.structs.replace(request(f"r{n}"), scopes=("key:k", "org")), Held(None))  # type: ignore[arg-type]
        lead.begin(counted=True)
    took_s = []
    for _ in range(20):
        began_s = time.process_time()
        await leash.ask()
        took_s.append(time.process_time() - began_s)

    assert min(took_s) < 0.002 and store.batches == [100] * 20


@on_loop
async def test_a_call_is_of_one_organisation_and_a_hundred_requests_at_most() -> None:
    store = Told()
    leash = Leash(store, Nobody(), 100.0)  # type: ignore[arg-type]
    for n in range(250):
        one = request(f"r{n}")
        caller = msgspec.structs.replace(one.caller, org_id="one" if n < 120 else "two")
        leash.follow(msgspec.structs.replace(one, caller=caller), Held(None))  # type: ignore[arg-type]
    await leash.ask()

    assert store.batches == [100, 20, 100, 30]


def lead_of(one: Request, output: int, allowance: int) -> Lead:
    return Lead(one, Held(None, usage=Usage(output_tokens=output)), allowance)  # type: ignore[arg-type]


def test_while_a_report_is_under_way_nobody_goes_beyond_what_it_asks_for() -> None:
    """The store may give back what is not asked for: the answer is less than the allowance was, and comes late."""
    leash = Leash(None, None, 10.0)  # type: ignore[arg-type]
    one = msgspec.structs.replace(request("a", n=5000), allowance_tokens=4000)
    lead = lead_of(one, 100, 4000)

    report = leash._of(lead, 0.0)

    assert report.money_tokens == 623 and lead.allowance == 723  # a window at ten a second


def test_the_input_is_not_told_before_it_is_known_what_was_cached() -> None:
    leash = Leash(None, None, 10.0)  # type: ignore[arg-type]
    lead = lead_of(request("a"), 0, UNBOUND)
    lead.held.usage = Usage(input_tokens=50)
    before = leash._of(lead, 0.0).usage
    lead.held.usage = Usage(input_tokens=50, cached_tokens=40, output_tokens=1)
    lead.begin(counted=True)

    assert before == Usage() and leash._of(lead, time.monotonic()).usage == lead.held.usage


# --- text that ends inside a piece


def decoded(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("before", "shown", "piece", "keep", "said"),
    [
        pytest.param("ab", "ab", Piece(tokens=(99, 100, 101), text="cde"), 2, "cd", id="plain"),
        pytest.param("ab", "ab", Piece(tokens=(99, 100, 101), text="cde"), 0, "", id="nothing of it"),
        pytest.param("abc", "a", Piece(tokens=(100,), text="b"), 0, "bc", id="held back, and the piece is not paid"),
        pytest.param("abc", "a", Piece(), 0, "bc", id="held back, and no piece"),
        pytest.param("ab", "ab", Piece(tokens=(99, 0xC3, 0xA9), text="cé"), 2, "c", id="half a character"),
        pytest.param("ab", "a", Piece(tokens=(67, 68), text="b", finish="stop", stop="CD"), 1, "b", id="stop string"),
        pytest.param("abc", "ab", Piece(), -1, "", id="a token before does not count"),
    ],
)
def test_an_output_that_ends_inside_a_piece(before: str, shown: str, piece: Piece, keep: int, said: str) -> None:
    assert said_until(list(before.encode()), shown, piece, keep, decoded) == said


def test_where_special_tokens_are_text_what_is_surely_later_is_left_out() -> None:
    """A decoder that leaves them out tells only of what follows."""

    def without_marks(ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token > 31).decode()

    piece = Piece(tokens=(1, 97, 98), text="<mark>ab")
    assert said_until([], "", piece, 2, without_marks) == "<mark>a"
    assert said_until([99], "c", Piece(tokens=(1,), text="<mark>"), 0, without_marks) == ""


def in_sevens(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine gives tokens seven at a time, as one that guesses ahead."""
    generate = worker.engine.generate

    async def merged(one: Request, cut: int = 0) -> AsyncGenerator[Piece]:
        tokens: tuple[int, ...] = ()
        text = ""
        async for piece in generate(one, cut):
            tokens, text = tokens + piece.tokens, text + piece.text
            if len(tokens) == 7 or piece.finish:
                yield msgspec.structs.replace(piece, tokens=tokens, text=text)
                tokens, text = (), ""

    monkeypatch.setattr(worker.engine, "generate", merged)
