"""Streams outlive the worker they began on, and the store's absence. Real signals, real processes.

Token k of a sampled request without a seed is a function of its id and k on the scripted engine, so the client knows
every token of every stream, however many workers made it.
"""

from __future__ import annotations

import json
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import psutil
import pytest

from core.redis import tag
from core.values import Caller, Request, Sampling
from tests import platform as platforms
from tests.laws.test_faults import greedy_text, running, stream_text, text_of
from tests.platform import MODEL, Platform, kill, until
from workers.scripted import REASONING_TOKENS, script_seed

#: About four seconds on the scripted engine.
LONG = 900

#: What one stream came to: request id, text, how it ended.
Told = tuple[str, str, str]


def sampled_text(request_id: str, n: int) -> str:
    request = Request(
        id=request_id, model=MODEL, caller=Caller(org_id="", project_id="", key_id=""), gateway="",
        prompt_token_ids=[], sampling=Sampling(max_tokens=n),
    )  # fmt: skip
    return text_of(script_seed(request), n)


def streams(pool: ThreadPoolExecutor, platform: Platform, count: int, tokens: int = LONG) -> list[Future[Told]]:
    return [pool.submit(stream_text, platform, n, max_tokens=tokens) for n in range(count)]


def are_whole(told: Sequence[Told], tokens: int = LONG) -> bool:
    """Every token once, in order, and the ending that it would have had undisturbed."""
    return all((text, end) == (sampled_text(request_id, tokens), "length") for request_id, text, end in told)


def are_billed_once(platform: Platform, told: Sequence[Told], tokens: int = LONG) -> bool:
    platform.quiet()
    rows = Counter((str(row["event_id"]), row["outcome"], row["output_tokens"]) for row in platform.usage_rows())
    return all(rows[(request_id, "length", tokens)] == 1 for request_id, _, _ in told)


def test_a_killed_workers_streams_continue_without_a_gap_or_a_repeat(platform: Platform) -> None:
    """Sampled streams: nobody could make their tokens again, so another worker goes on from what was delivered."""
    with ThreadPoolExecutor(20) as pool:
        asked = streams(pool, platform, 20)
        until(lambda: platform.busy() and len(running(platform)) == 20, "all to run")
        time.sleep(0.7)
        kill(platform.busy()[0].pid)
        told = [one.result() for one in asked]

    assert are_whole(told)
    attempts = Counter(platform.rows()[request_id].attempt for request_id, _, _ in told)
    assert attempts[2] > 0 and set(attempts) <= {1, 2}
    assert are_billed_once(platform, told)


def test_a_stream_outlives_one_worker_after_the_other(platform: Platform) -> None:
    """What the second worker delivered before it died is found in its own log, what the first did was saved."""
    with ThreadPoolExecutor(1) as pool:
        [asked] = streams(pool, platform, 1, 1500)
        for attempt in (1, 2):
            [request_id] = until(lambda a=attempt: at_attempt(platform, a), f"attempt {attempt}")
            time.sleep(0.8)
            platform.worker_running(request_id).kill()
            until(lambda: len(platform.workers()) == 2, "two workers")
        told = asked.result()

    assert are_whole([told], 1500)
    assert are_billed_once(platform, [told], 1500)
    assert platform.rows()[told[0]].attempt == 3


def at_attempt(platform: Platform, attempt: int) -> list[str]:
    return [name for name, row in running(platform).items() if row.attempt == attempt]


def test_a_worker_that_must_go_hands_over_what_it_cannot_end(platform: Platform) -> None:
    """SIGTERM: five seconds to drain here, and streams of eight."""
    with ThreadPoolExecutor(6) as pool:
        asked = streams(pool, platform, 6, 2000)
        until(lambda: platform.busy() and len(running(platform)) == 6, "all to run")
        kill(platform.busy()[0].pid, signal.SIGTERM)
        told = [one.result() for one in asked]

    assert are_whole(told, 2000)
    assert are_billed_once(platform, told, 2000)
    assert any(platform.rows()[request_id].attempt == 2 for request_id, _, _ in told)


def test_a_zombie_adds_nothing_to_a_stream_that_was_handed_over(platform: Platform) -> None:
    """Paused past its lease, it goes on in the middle of a step; the gateway takes nothing of an older attempt."""
    with ThreadPoolExecutor(10) as pool:
        asked = streams(pool, platform, 10, 1000)
        until(lambda: platform.busy() and len(running(platform)) == 10, "all to run")
        time.sleep(0.5)
        zombie = psutil.Process(platform.busy()[0].pid)
        zombie.suspend()
        until(lambda: at_attempt(platform, 2), "another worker to take over", 10)
        time.sleep(0.5)
        zombie.resume()
        told = [one.result() for one in asked]

    assert are_whole(told, 1000)
    assert are_billed_once(platform, told, 1000)


def test_a_store_away_for_longer_than_a_lease_runs_nothing_again(platform: Platform) -> None:
    """Stopped for two leases: workers go on into their buffers, and nobody is reaped when it is back."""
    server = psutil.Process(int(platform.store.client.info("server")["process_id"]))
    with ThreadPoolExecutor(10) as pool:
        asked = streams(pool, platform, 10, 1500)
        until(lambda: len(running(platform)) == 10, "all to run")
        time.sleep(0.5)
        server.suspend()
        time.sleep(4)
        server.resume()
        told = [one.result() for one in asked]

    assert are_whole(told, 1500)
    assert {platform.rows()[request_id].attempt for request_id, _, _ in told} == {1}


def test_seeded_samples_that_had_begun_end_as_lost_and_cost_nothing(platform: Platform) -> None:
    """Their random numbers cannot be gone on with; an error that says so is better than a splice."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(stream_text, platform, 0, seed=7, max_tokens=LONG)
        [request_id] = until(lambda: list(running(platform)), "it to run")
        time.sleep(0.5)
        platform.worker_running(request_id).kill()
        told = asked.result()

    assert told[2] == "worker_lost" and text_of(7, LONG).startswith(told[1]) and told[1]
    row = platform.usage_of(request_id)
    assert (row["outcome"], row["output_tokens"]) == ("worker_lost", 0)


def test_greedy_text_is_the_same_on_two_workers_as_on_one(platform: Platform) -> None:
    with ThreadPoolExecutor(1) as pool:
        messages = [{"role": "user", "content": "h"}]
        asked = pool.submit(stream_text, platform, 0, temperature=0, messages=messages, max_tokens=LONG)
        [request_id] = until(lambda: list(running(platform)), "it to run")
        time.sleep(0.7)
        platform.worker_running(request_id).kill()

    assert asked.result()[1:] == (greedy_text("h", LONG), "length")


def test_nothing_is_left_behind_but_what_expires(platform: Platform) -> None:
    """Every key of the queue beside its fixed ones has a time to live."""
    told = stream_text(platform, 0, max_tokens=20)
    platform.quiet()
    store, prefix = platform.store.client, tag(MODEL)
    for kind in ("output:", "view:", "log:", "wake:"):
        for key in store.scan_iter(f"{prefix}{kind}*"):
            assert store.ttl(key) > 0, key
    assert store.exists(f"{prefix}output:{told[0]}") and not store.exists(f"{prefix}body:{told[0]}")
    row = msgspec.msgpack.decode(store.hget(prefix + "rows", told[0]))  # type: ignore[arg-type]
    assert set(row) == {"state", "attempt", "worker", "owner", "ending"}


# --- what is not text


#: Thinks before it answers, and calls; 50 tokens a second, so that each stage can be interrupted.
THINKS = """
[models.scripted]
tokenizer = "bytes"
context_tokens = 4096
max_output_tokens = 256
slots = 32
workers = { min = 2, max = 2 }
[models.scripted.engine]
tool_parser = "scripted"
reasoning_parser = "scripted"
[models.scripted.step]
base_ms = 20.0
sequence_ms = 0.0
prefill_ms = 0.0
"""

CITY = {"type": "object", "properties": {"city": {"type": "string", "minLength": 60}}, "required": ["city"]}
CALLED = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}],
    "max_tokens": 200,
}


@pytest.fixture(scope="module")
def thinker() -> Iterator[Platform]:
    yield from platforms.alone(catalog=THINKS, gateways=1)


def part_of(delta: Any) -> tuple[str, str]:
    """Which part of an answer a chunk has, and its characters."""
    if calls := delta.tool_calls:
        name = calls[0].function.name
        return ("name", name) if name else ("arguments", calls[0].function.arguments)
    if thought := getattr(delta, "reasoning_content", None):
        return "reasoning", thought
    return "text", delta.content or ""


@pytest.mark.parametrize("killed_at", ["reasoning", "name", "arguments"])
def test_a_call_outlives_its_worker_wherever_it_is_killed(thinker: Platform, killed_at: str) -> None:
    """In the middle of thinking, of a name, of arguments: what the client adds up is what an unbroken run says."""
    until(lambda: len(thinker.workers()) == 2, "two workers")
    parts: dict[str, str] = defaultdict(str)
    ids, names, ends = [], [], []
    create: Any = thinker.client().chat.completions.create
    with create(**CALLED, stream=True) as chunks:
        for chunk in chunks:
            [choice] = chunk.choices
            part, text = part_of(choice.delta)
            if part == killed_at and not parts[part]:
                [request_id] = running(thinker)
                thinker.worker_running(request_id).kill()
            parts[part] += text
            ids += [call.id for call in choice.delta.tool_calls or [] if call.id]
            names += [text] if part == "name" else []
            ends += [choice.finish_reason] if choice.finish_reason else []

    row = thinker.usage_of(request_id)
    assert thinker.rows()[request_id].attempt == 2
    assert (len(ids), names, ends) == (1, ["get_weather"], ["tool_calls"])
    assert json.loads(parts["arguments"]) == {"city": "abc" * 20}
    assert parts["reasoning"] == sampled_thought(request_id) and not parts["text"]
    assert (row["outcome"], row["attempt"]) == ("completed", 2)
    output = f"..{parts['reasoning']}...get_weather{parts['arguments']}"
    assert row["output_tokens"] == len(output), "and the five marks"


def sampled_thought(request_id: str) -> str:
    request = Request(
        id=request_id, model=MODEL, caller=Caller(org_id="", project_id="", key_id=""), gateway="",
        prompt_token_ids=[], sampling=Sampling(max_tokens=1),
    )  # fmt: skip
    return text_of(script_seed(request) ^ 1, REASONING_TOKENS)
