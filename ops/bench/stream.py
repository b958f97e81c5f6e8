"""`forebay bench stream`: what a streamed token, a request and an idle socket cost at the gateway.

The scripted engine steps at a fixed pace, and all streams step together, as a real batch does. Four runs on the same
platform after a warm-up, and two on platforms of their own:

1. many streams at once: processor time of the gateway, the worker and the store, per token streamed. What the
   requests themselves cost is in it; each streams for so long that it hardly shows.
2. many requests of one token: the gateway's processor time per request, less that of its token.
3. a few streams: how much later than the engine's pace a token comes at the client, while no processor is busy.
4. idle WebSockets: how much memory each adds to the gateway.
5. a crowd at one gateway process, two tokens a second each: how much later than the engine's pace a token comes, while
   all of them stream. The client measures its own delay too, which is in it.
6. one quick stream while prompts of 100,000 tokens are posted, one after the other: the time between its tokens. Each
   of two workers has one slot, so that they share nothing but the gateway and the store.

With peers, other gateways get the loads of runs 1 and 2 afterwards (`ops/bench/peers.py`).
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ops import prepare
from ops.bench import peers
from ops.bench.load import Seen, drive, idle_sockets
from ops.bench.platform import BenchFailed, Cpu, Platform, running, scripted
from ops.bench.report import Found, Say

#: The engine's pace, ms a step: 20 tokens a second for each stream.
STEP_MS = 50.0
#: Room for the prompt beside the tokens.
PROMPT_TOKENS = 256
#: Requests of one token: how many at once, and how many one after the other.
SHORT_AT_ONCE, SHORT_IN_A_ROW = 10, 30
#: The run that measures latency: a share of the streams, so that no processor is busy, and not longer than this.
LIGHT_SHARE, LIGHT_TOKENS = 8, 200
#: Idle WebSockets; the first ones bring what all share, and are not counted.
SOCKETS, FIRST_SOCKETS = 500, 20
#: The crowd: each has so many tokens at such a pace, so that all stream together long after the last was admitted; they
#: come so many a second.
CROWD_STEP_MS, CROWD_TOKENS, CROWD_PER_S = 500.0, 70, 100
#: A smaller crowd is there sooner, and needs fewer.
CROWD_WHOLE, CROWD_TOKENS_MIN = 1000, 12
#: The long prompts; and the quick stream beside them, ms a step.
LONG_TOKENS, QUICK_STEP_MS, QUICK_TOKENS = 100_000, 10.0, 1000
#: Its tokenizer, where `make setup` has put it; else the prompt is one of bytes.
TOKENIZER = "smollm2-135m-instruct"
#: About a token a word, in that tokenizer.
WORDS = "the water behind the wall is high today and falls to the wheels below "
#: How long the gateway may take to settle down before its memory is read, seconds.
SETTLE_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Options:
    streams: int
    tokens: int  #: per stream
    seconds: float  #: go on with new streams for so long; 0: each stream once
    crowd: int  #: streams at one gateway process
    peers: bool = False  #: other gateways get the same load afterwards


def figures(options: Options, say: Say) -> Found:
    """Measure everything.

    Raises:
      BenchFailed: the platform, or a request to it, failed.
    """
    say("Starting a platform of its own")
    with running(_catalog(options)) as platform:
        say("Warming up")
        drive(platform, connections=SHORT_AT_ONCE, tokens=20, requests=2)
        seen, cpu = _many_streams(platform, options, say)
        us_per_token = cpu.gateway_s / seen.tokens * 1e6
        found = {
            "gateway_cpu_us_per_token": us_per_token,
            "total_cpu_us_per_token": cpu.total_s / seen.tokens * 1e6,
            "gateway_cpu_ms_per_request": _ms_per_request(platform, us_per_token, say),
            "streams": seen.streams,
            "added_itl_ms_p99": _added_itl_ms(platform, options, say),
            "idle_socket_kb": _idle_socket_kb(platform, say),
        }
    found |= _crowd(options, say)
    found["long_prompt_itl_ms_p99"] = _itl_ms_beside_long_prompts(say)
    return {name: round(value, 2) for name, value in found.items()}, _peers(options, say) if options.peers else {}


def _peers(options: Options, say: Say) -> dict[str, dict[str, Any]]:
    shape = peers.Shape(
        streams=options.streams, tokens=options.tokens, seconds=options.seconds, step_ms=STEP_MS,
        short_at_once=SHORT_AT_ONCE, short_in_a_row=SHORT_IN_A_ROW,
    )  # fmt: skip
    return peers.figures(shape, say)


def _catalog(options: Options) -> str:
    return scripted(
        context_tokens=options.tokens + PROMPT_TOKENS,
        output_tokens=options.tokens,
        slots=max(options.streams, SHORT_AT_ONCE),
        step_ms=STEP_MS,
        workers=1,
    )


def _many_streams(platform: Platform, options: Options, say: Say) -> tuple[Seen, Cpu]:
    round_s = options.tokens * STEP_MS / 1000
    say(f"{options.streams} streams of {options.tokens} tokens, {round_s:.0f} s each")
    before = platform.cpu()
    seen = drive(platform, connections=options.streams, tokens=options.tokens, seconds=options.seconds)
    cpu = platform.cpu().since(before)
    say(
        f"  {seen.tokens} tokens in {seen.events} events and {seen.seconds:.1f} s; processor seconds:"
        f" gateway {cpu.gateway_s:.2f}, worker {cpu.worker_s:.2f}, store {cpu.store_s:.2f}"
    )
    return seen, cpu


def _ms_per_request(platform: Platform, us_per_token: float, say: Say) -> float:
    say(f"{SHORT_AT_ONCE * SHORT_IN_A_ROW} requests of one token, {SHORT_AT_ONCE} at once")
    before = platform.cpu()
    seen = drive(platform, connections=SHORT_AT_ONCE, tokens=1, requests=SHORT_IN_A_ROW)
    used_s = platform.cpu().since(before).gateway_s
    say(f"  {used_s:.2f} s of the gateway; first token after {seen.ttft_ms_p50:.0f} ms (p50)")
    return used_s / seen.requests * 1e3 - us_per_token / 1e3


def _added_itl_ms(platform: Platform, options: Options, say: Say) -> float:
    """The engine counts each step from when the last one was due, so its pace is STEP_MS, whatever happens here."""
    streams = max(1, options.streams // LIGHT_SHARE)
    tokens = min(options.tokens, LIGHT_TOKENS)
    say(f"{streams} streams of {tokens} tokens, {tokens * STEP_MS / 1000:.0f} s")
    seen = drive(platform, connections=streams, tokens=tokens)
    say(f"  between two tokens {seen.itl_ms_p50:.1f} ms (p50), {seen.itl_ms_p99:.1f} ms (p99)")
    return seen.itl_ms_p99 - STEP_MS


def _idle_socket_kb(platform: Platform, say: Say) -> float:
    say(f"{SOCKETS} idle WebSockets")
    with idle_sockets(platform, FIRST_SOCKETS):
        time.sleep(SETTLE_S)
        before_bytes = platform.gateway_rss_bytes()
        with idle_sockets(platform, SOCKETS):
            time.sleep(SETTLE_S)
            more_bytes = platform.gateway_rss_bytes() - before_bytes
    if more_bytes <= 0:
        raise BenchFailed("The gateway's memory did not grow with its sockets: nothing was measured.")
    return more_bytes / SOCKETS / 1024


def _crowd(options: Options, say: Say) -> dict[str, float]:
    tokens = CROWD_TOKENS if options.crowd >= CROWD_WHOLE else CROWD_TOKENS_MIN
    say(f"{options.crowd} streams at one gateway process, {tokens} tokens of {CROWD_STEP_MS:.0f} ms each")
    catalog = scripted(
        context_tokens=tokens + PROMPT_TOKENS, output_tokens=tokens, slots=options.crowd,
        step_ms=CROWD_STEP_MS, workers=1,
    )  # fmt: skip
    with running(catalog, {"FOREBAY_WEB_PROCESSES": "1"}) as platform:
        drive(platform, connections=SHORT_AT_ONCE, tokens=2, token_s=10.0)
        before = platform.cpu()
        seen = drive(
            platform, connections=options.crowd, tokens=tokens, steady=True, over_s=options.crowd / CROWD_PER_S,
            token_s=2 * CROWD_STEP_MS / 1000,
        )  # fmt: skip
        busy_s = platform.cpu().since(before).gateway_s
    say(
        f"  {seen.streams} at once; between two tokens {seen.itl_ms_p50:.1f} ms (p50), {seen.itl_ms_p99:.1f} ms (p99);"
        f" the client's own delay {seen.lag_ms_p99:.1f} ms (p99); gateway busy {busy_s / seen.seconds:.0%}"
    )
    if not seen.itl_ms_p99:
        raise BenchFailed("The crowd never streamed all at once: nothing was measured.")
    return {"crowd_streams": seen.streams, "crowd_added_itl_ms_p99": seen.itl_ms_p99 - CROWD_STEP_MS}


def _itl_ms_beside_long_prompts(say: Say) -> float:
    folder = Path(os.environ.get("FOREBAY_DATA", prepare.ROOT / ".forebay")).absolute() / "models" / TOKENIZER
    real = (folder / "tokenizer.json").exists()
    say(f"One stream beside prompts of {LONG_TOKENS} tokens" + ("" if real else ", of bytes: there is no tokenizer"))
    catalog = scripted(
        context_tokens=2 * LONG_TOKENS, output_tokens=QUICK_TOKENS, slots=1, step_ms=QUICK_STEP_MS, workers=2,
        tokenizer=str(folder) if real else "bytes",
    )  # fmt: skip
    with running(catalog) as platform, ThreadPoolExecutor(1) as streams:
        drive(platform, connections=1, tokens=20)
        streamed = streams.submit(drive, platform, connections=1, tokens=QUICK_TOKENS)
        posted = 0
        while not streamed.done():
            _post_long_prompt(platform)
            posted += 1
        seen = streamed.result()
    say(f"  beside {posted} of them {seen.itl_ms_p99:.1f} ms (p99), {seen.itl_ms_max:.1f} ms (most)")
    return seen.itl_ms_p99


def _post_long_prompt(platform: Platform) -> None:
    text = WORDS * (LONG_TOKENS // len(WORDS.split()) + 1)
    body = {"model": platform.ready.model, "max_tokens": 1, "messages": [{"role": "user", "content": text}]}
    headers = {"Authorization": f"Bearer {platform.ready.api_key}"}
    answer = httpx.post(f"{platform.ready.url}/v1/chat/completions", json=body, headers=headers, timeout=60.0)
    if answer.status_code != 200 or answer.json()["usage"]["prompt_tokens"] < LONG_TOKENS:
        raise BenchFailed(f"A long prompt was refused, or is short: {answer.text[:500]}")
