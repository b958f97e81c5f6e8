"""`forebay bench handover`: what a client sees when its worker dies, or the store goes away.

A platform of its own with two workers on the scripted engine, where every token of every stream is known: half of the
streams are greedy (their text follows from their prompt), half are sampled (theirs from their id). So many streams are
always open; one that ends is followed by another.

1. `kills`: a busy worker is killed (SIGKILL) at a random moment, and its host's agent reports it. The pause of a stream
   is the longest silence between two of its tokens around the kill; only the streams that the killed worker had count.
2. `lease_kills`: the same while the agent is stopped (SIGSTOP), so that only the worker's lease tells.
3. `outages_s`: the store is stopped (SIGSTOP) for so long under as many running streams. An attempt after the first is
   a re-run.

At the end every request has exactly one row in Postgres, with the tokens that its client was sent.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import msgspec
import psutil

from core import fleet, postgres
from core.redis import Store, command, tag
from core.values import Caller, Request, Sampling
from ops.bench.load import quantile
from ops.bench.platform import BenchFailed, Platform, running, scripted
from ops.bench.report import Found, Say
from tasks.queue import Queue
from web.dialects.draft import Message
from web.render import ByteRenderer
from workers.scripted import script_seed, scripted_tokens

MODEL = "scripted"
#: The engine's pace, ms a step.
STEP_MS = 20.0
#: The tokens of a stream: some are always at their beginning, some at their end.
TOKENS = (100, 400)
#: Tokens of the streams that live through an outage: what the outage takes, and a while before and after.
OUTAGE_MARGIN_S = 6.0
#: How long a killed worker may take to be replaced, and the streams to end, seconds.
PATIENCE_S = 60.0
#: Wrong streams that are shown.
FAULTS_SHOWN = 20
#: How long a stream is looked at after a kill, seconds.
LOOK_S = 12.0


@dataclass(frozen=True, kw_only=True)
class Options:
    streams: int = 100
    kills: int = 20
    lease_kills: int = 5
    outages_s: tuple[float, ...] = (4.0, 20.0)
    seed: int = 1


@dataclass
class Stream:
    """What one client saw."""

    greedy: bool
    prompt: str
    asked: int  #: tokens
    request_id: str = ""
    text: str = ""
    at_s: array[float] = field(default_factory=lambda: array("d"))  #: when each event came
    ends: list[str] = field(default_factory=list)

    def expected(self) -> str:
        sampling = Sampling(max_tokens=self.asked, temperature=0.0 if self.greedy else 1.0)
        request = Request(
            id=self.request_id, model=MODEL, caller=Caller(org_id="", project_id="", key_id=""), gateway="",
            prompt_token_ids=ByteRenderer().render([Message("user", self.prompt)]), sampling=sampling,
        )  # fmt: skip
        return bytes(scripted_tokens(script_seed(request), self.asked)).decode()

    def pause_ms(self, since_s: float) -> float | None:
        """The longest silence that ends after `since_s`; None: it had no token before that, or none after."""
        gaps = [
            (later - earlier) * 1000
            for earlier, later in zip(self.at_s, self.at_s[1:], strict=False)
            if since_s < later < since_s + LOOK_S
        ]
        return max(gaps) if gaps and self.at_s[0] < since_s else None


def figures(options: Options, say: Say) -> Found:
    """Measure everything.

    Raises:
      BenchFailed: the platform did not start or did not recover.
    """
    chance = random.Random(options.seed)
    say("Starting a platform of its own")
    catalog = scripted(slots=options.streams + 8, step_ms=STEP_MS, context_tokens=8192, output_tokens=4096, workers=2)
    with running(catalog) as platform, _Crowd(platform) as crowd:
        scene = _Scene(platform, crowd, chance, say)
        crowd.open(options.streams, lambda: chance.randint(*TOKENS))
        say(f"{options.kills} kills, reported by the host's agent")
        reported_ms = [pause for _ in range(options.kills) for pause in scene.kill()]
        say(f"{options.lease_kills} kills, found by the lease")
        leased_ms = [pause for _ in range(options.lease_kills) for pause in scene.kill(reported=False)]
        crowd.finish()
        reruns = sum(scene.outage(options.streams, seconds) for seconds in options.outages_s)
        for fault in itertools.islice(filter(None, map(fault_of, crowd.streams)), FAULTS_SHOWN):
            say(f"  {fault}")
        wrong_rows = scene.wrong_rows()
    found = {
        "kills": options.kills + options.lease_kills,
        "streams": len(crowd.streams),
        "handed_over": len(reported_ms) + len(leased_ms),
        "pause_ms_p50": quantile(array("d", reported_ms), 0.5),
        "pause_ms_p99": quantile(array("d", reported_ms), 0.99),
        "lease_pause_ms_p50": quantile(array("d", leased_ms), 0.5),
        "lease_pause_ms_p99": quantile(array("d", leased_ms), 0.99),
        **judged(crowd.streams),
        "usage_rows_wrong": wrong_rows,
        "reruns_after_store_outage": reruns,
    }
    return {name: round(value, 1) for name, value in found.items()}, {}


def judged(streams: Iterable[Stream]) -> dict[str, int]:
    """What is wrong with what the clients saw. A text that differs is told as missing or repeated where it is one."""
    missing = repeated = changed = endings_wrong = 0
    for stream in streams:
        expected = stream.expected()
        missing += max(0, len(expected) - len(stream.text))
        repeated += max(0, len(stream.text) - len(expected))
        changed += stream.text != expected
        endings_wrong += stream.ends != ["length"]
    return {
        "tokens_missing": missing,
        "tokens_repeated": repeated,
        "texts_changed": changed,
        "endings_wrong": endings_wrong,
    }


def fault_of(stream: Stream) -> str:
    """What is wrong with a stream, for people; empty when nothing is."""
    expected = stream.expected()
    if stream.text == expected and stream.ends == ["length"]:
        return ""
    same = next((n for n, (a, b) in enumerate(zip(stream.text, expected, strict=False)) if a != b), len(stream.text))
    return f"{stream.request_id}: right up to {same} of {stream.asked} tokens, {len(stream.text)} came; {stream.ends}"


class _Crowd:
    """Clients on a loop of their own thread, a stream each."""

    def __init__(self, platform: Platform) -> None:
        where = urlsplit(platform.ready.url)
        self.host, self.port, self.key = where.hostname or "", where.port or 80, platform.ready.api_key
        self.streams: list[Stream] = []
        self.over = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._open: set[asyncio.Future[None]] = set()

    def __enter__(self) -> _Crowd:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def open(self, count: int, tokens: Callable[[], int]) -> None:
        """Keep so many streams open until `finish`."""
        self.over = False
        for n in range(count):
            self._loop.call_soon_threadsafe(self._begin, self._endless(n, tokens))

    def finish(self) -> None:
        """Begin nothing new, and wait until all have ended.

        Raises:
          BenchFailed: some did not.
        """
        self.over = True
        deadline = time.monotonic() + PATIENCE_S
        while self._open:
            if time.monotonic() > deadline:
                raise BenchFailed(f"{len(self._open)} streams did not end in {PATIENCE_S:.0f} s.")
            time.sleep(0.05)

    def of(self, request_ids: set[str]) -> list[Stream]:
        return [stream for stream in self.streams if stream.request_id in request_ids]

    def _begin(self, coroutine: asyncio._CoroutineLike[None]) -> None:
        task = self._loop.create_task(coroutine)
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _endless(self, n: int, tokens: Callable[[], int]) -> None:
        first = True
        while first or not self.over:
            first = False
            stream = Stream(greedy=n % 2 == 0, prompt=f"{n}.{len(self.streams)}", asked=tokens())
            self.streams.append(stream)
            try:
                await self._read(stream)
            except (OSError, asyncio.IncompleteReadError, msgspec.DecodeError) as e:
                stream.ends.append(repr(e))

    async def _read(self, stream: Stream) -> None:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(self._request(stream))
            await self._head(stream, reader)
            while (line := await reader.readline()) not in (b"", b"data: [DONE]\n"):
                if line.startswith(b"data: {"):
                    self._take(stream, msgspec.json.decode(line[6:]), time.monotonic())
        finally:
            writer.close()

    def _request(self, stream: Stream) -> bytes:
        body = msgspec.json.encode(
            {
                "model": MODEL, "stream": True, "max_tokens": stream.asked,
                "temperature": 0 if stream.greedy else 1, "messages": [{"role": "user", "content": stream.prompt}],
            }
        )  # fmt: skip
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self.host}\r\nAuthorization: Bearer {self.key}\r\n"
            f"Connection: close\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def _head(self, stream: Stream, reader: asyncio.StreamReader) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        for line in head.split("\r\n"):
            name, _, value = line.partition(": ")
            if name.lower() == "x-request-id":
                stream.request_id = value
        if " 200 " not in head.split("\r\n")[0]:
            stream.ends.append(head.split("\r\n")[0])

    @staticmethod
    def _take(stream: Stream, chunk: dict[str, object], now_s: float) -> None:
        if "error" in chunk:
            stream.ends.append(str(chunk["error"]))
        for choice in chunk.get("choices") or ():  # type: ignore[attr-defined]
            if text := choice["delta"].get("content"):
                stream.text += text
                stream.at_s.append(now_s)
            if choice["finish_reason"]:
                stream.ends.append(choice["finish_reason"])


class _Scene:
    """What happens to the platform."""

    def __init__(self, platform: Platform, crowd: _Crowd, chance: random.Random, say: Say) -> None:
        self.platform, self.crowd, self.chance, self.say = platform, crowd, chance, say
        self.store = Store.connect(platform.ready.redis_url)
        self.queue = Queue(MODEL)

    def kill(self, *, reported: bool = True) -> list[float]:
        """Kill a busy worker at a random moment; the pauses of its streams, ms."""
        self._until(lambda: len(self._ready()) == 2 and self._spread(), "two busy workers")
        time.sleep(self.chance.uniform(0.2, 1.5))
        victim = self.chance.choice(sorted(self._ready(), key=lambda row: row.worker))
        theirs = self._claims(victim.worker)
        with self._agent_stopped() if not reported else _nothing():
            killed_s = time.monotonic()
            psutil.Process(victim.pid).kill()
            self._until(lambda: not self._claims(victim.worker), "another worker to take them over")
            time.sleep(2.0)
        pauses = [p for stream in self.crowd.of(theirs) if (p := stream.pause_ms(killed_s)) is not None]
        if pauses:
            worst = max(pauses)
            self.say(f"  {len(theirs)} requests; pause {quantile(array('d', pauses), 0.5):.0f} ms, at most {worst:.0f}")
        return pauses

    def outage(self, streams: int, seconds: float) -> int:
        """Stop the store for so long under running streams; the attempts after the first."""
        self.say(f"The store stops for {seconds:.0f} s under {streams} streams")
        before = len(self.crowd.streams)
        tokens = int((seconds + OUTAGE_MARGIN_S) * 1000 / STEP_MS)
        self.crowd.open(streams, lambda: tokens)
        self.crowd.over = True
        self._until(lambda: self._running() == streams, "all streams to run")
        time.sleep(1.0)
        server = psutil.Process(self.platform.ready.pids["valkey"])
        server.suspend()
        time.sleep(seconds)
        server.resume()
        self.crowd.finish()
        ids = {stream.request_id for stream in self.crowd.streams[before:]}
        return sum(attempt - 1 for attempt in self._attempts(ids))

    def wrong_rows(self) -> int:
        """Requests without exactly one row that says what its client was sent."""
        self._until(lambda: self.store.client.xlen(tag(MODEL) + "usage") == 0, "the usage to arrive")
        engine = postgres.connect(self.platform.ready.database_url)
        try:
            with postgres.transaction(engine) as connection:
                found = connection.execute(postgres.text("SELECT event_id::text, output_tokens FROM usage_events"))
                rows = [(str(request_id), int(tokens)) for request_id, tokens in found]
        finally:
            engine.dispose()
        times, tokens = Counter(request_id for request_id, _ in rows), dict(rows)
        return sum(
            times[stream.request_id] != 1 or tokens[stream.request_id] != len(stream.text)
            for stream in self.crowd.streams
        )

    def _ready(self) -> list[fleet.Worker]:
        return [row for row in self.store.run(fleet.workers(MODEL)) if row.state == "ready"]

    def _spread(self) -> bool:
        return all(self._claims(row.worker) for row in self._ready())

    def _claims(self, worker: str) -> set[str]:
        claims = self.store.run(command("ZRANGE", tag(MODEL) + "claims", 0, -1, reply=_texts))
        return {claim.rpartition("|")[2] for claim in claims if claim.startswith(worker + "|")}

    def _running(self) -> int:
        return self.store.run(self.queue.tick()).running

    def _attempts(self, ids: set[str]) -> list[int]:
        rows = self.store.run(command("HMGET", tag(MODEL) + "rows", *ids, reply=list))
        return [msgspec.msgpack.decode(row, type=_Row).attempt for row in rows]

    @contextmanager
    def _agent_stopped(self) -> Iterator[None]:
        """The host's agent sees nothing, as if its host had died with the worker."""
        agent = psutil.Process(self.platform.ready.pids["worker"])
        agent.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            agent.send_signal(signal.SIGCONT)

    @staticmethod
    def _until(true: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not true():
            if time.monotonic() > deadline:
                raise BenchFailed(f"Waited {PATIENCE_S:.0f} s for {what}.")
            time.sleep(0.02)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


class _Row(msgspec.Struct):
    attempt: int


def _texts(raw: list[bytes]) -> list[str]:
    return [one.decode() for one in raw]
