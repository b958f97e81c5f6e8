"""`forebay bench stream`: what a streamed token, a request and an idle socket cost at the gateway.

The scripted engine steps at a fixed pace, and all streams step together, as a real batch does. Four runs, each on the
same platform after a warm-up:

1. many streams at once: processor time of the gateway, the worker and the store, per token streamed. What the
   requests themselves cost is in it; each streams for so long that it hardly shows.
2. many requests of one token: the gateway's processor time per request, less that of its token.
3. a few streams: how much later than the engine's pace a token comes at the client, while no processor is busy.
4. idle WebSockets: how much memory each adds to the gateway.

With peers, other gateways get the loads of runs 1 and 2 afterwards (`ops/bench/peers.py`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

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
#: How long the gateway may take to settle down before its memory is read, seconds.
SETTLE_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Options:
    streams: int
    tokens: int  #: per stream
    seconds: float  #: go on with new streams for so long; 0: each stream once
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
