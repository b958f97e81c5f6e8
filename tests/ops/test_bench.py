"""Benches: a small run of each gives every figure that was promised, and the client counts what it is sent."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from array import array
from pathlib import Path

import httpx
import psutil
import pytest

from ops import prepare
from ops.bench import limits, limits_clients, load, peers, report
from ops.bench.platform import BenchFailed, Cpu
from ops.bench.simulated import Job, Profile, SimulatedEngine
from ops.up import free_port
from tests.platform import until

QUEUE_KEYS = {"idle_start_ms_p50", "idle_start_ms_p99", "messages_per_s", "idle_commands_per_s"}
FAIRNESS_KEYS = {
    "service_gap_tokens", "vtc_bound_tokens", "light_wait_ms_p99", "light_alone_ms_p99", "slot_remainder_ms", "jain",
}  # fmt: skip
STREAM_KEYS = {
    "gateway_cpu_us_per_token", "total_cpu_us_per_token", "gateway_cpu_ms_per_request", "streams", "added_itl_ms_p99",
    "idle_socket_kb", "crowd_streams", "crowd_added_itl_ms_p99", "long_prompt_itl_ms_p99",
}  # fmt: skip


def bench(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a bench whose temporary files lie in `folder`."""
    argv, env = [sys.executable, "-m", "ops.cli", "bench", *words], os.environ | {"TMPDIR": str(folder)}
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=100, cwd=prepare.ROOT)


def running_in(folder: Path) -> list[psutil.Process]:
    """The processes that were told of a folder."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "environ"])
        if str(folder) in str(process.info["cmdline"]) + str(process.info["environ"])
    ]


def test_a_small_stream_bench_gives_every_figure_and_leaves_nothing(data: Path) -> None:
    """Standard output is one object and nothing else; the platform that was measured is gone afterwards."""
    folder = data / "bench"
    folder.mkdir()

    done = bench(folder, "stream", "--streams", "8", "--tokens", "50", "--crowd", "50", "--json", "-")

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {"bench", "figures", "peers", "machine", "seconds"}
    assert (found["bench"], found["peers"]) == ("stream", {})
    assert set(found["figures"]) == STREAM_KEYS
    assert all(math.isfinite(value) and value > 0 for value in found["figures"].values()), found["figures"]
    assert found["figures"]["streams"] == 8
    assert found["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert "8 streams of 50 tokens" in done.stderr
    assert list(folder.iterdir()) == running_in(folder) == []


#: A gateway that adds nothing: it hands on bytes, both ways, and burns some time for each answer's.
RELAY = """#!{python}
import asyncio, sys
async def copy(reader, writer, work):
    while data := await reader.read(65536):
        sum(range(work))
        writer.write(data)
    writer.close()
async def serve(reader, writer):
    there, thither = await asyncio.open_connection("127.0.0.1", int(sys.argv[2]))
    await asyncio.gather(copy(reader, thither, 0), copy(there, writer, 50_000))
async def main():
    await (await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1]))).serve_forever()
asyncio.run(main())
"""


def installed(data: Path, name: str, program: str) -> peers.Peer:
    """A peer that is there already: nothing is installed for it."""
    home = data / "peers" / name
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "gateway").write_text(program)
    (home / "bin" / "gateway").chmod(0o755)
    (home / "forebay.stamp").write_text(f"{name}==1")

    def argv(place: peers.Place) -> tuple[str, ...]:
        return str(place.bin / "gateway"), str(place.port), place.upstream.rpartition(":")[2]

    return peers.Peer(name=name, requirement=f"{name}==1", argv=argv)


def small_shape() -> peers.Shape:
    return peers.Shape(streams=8, tokens=60, seconds=0.0, step_ms=5.0, short_at_once=2, short_in_a_row=10)


def test_a_peer_is_measured_as_our_gateway_is_and_nothing_of_it_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    relay, said = installed(tmp_path, "relay", RELAY.format(python=sys.executable)), list[str]()

    found = peers.figures(small_shape(), said.append, peers=[relay], data=tmp_path)

    assert set(found) == {"relay"}
    assert set(found["relay"]) == {"gateway_cpu_us_per_token", "gateway_cpu_ms_per_request"}
    assert found["relay"]["gateway_cpu_us_per_token"] > 100, "it burns that much"
    assert "480 tokens in 480 events" in " ".join(said)
    assert running_in(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["peers"]


def test_a_peer_that_cannot_be_installed_or_started_is_left_out_and_the_others_are_measured(tmp_path: Path) -> None:
    missing = peers.Peer(name="missing", requirement=f"{tmp_path}/no-such-package", argv=lambda place: ("true",))
    broken = installed(tmp_path, "broken", "#!/bin/sh\necho the licence has run out\nexit 3\n")
    relay, said = installed(tmp_path, "relay", RELAY.format(python=sys.executable)), list[str]()

    found = peers.figures(small_shape(), said.append, peers=[missing, broken, relay], data=tmp_path)

    assert set(found) == {"relay"}
    text = "\n".join(said)
    assert "missing is left out: it was not installed" in text
    assert "no-such-package" in text
    assert "broken is left out: it did not start" in text
    assert "the licence has run out" in text


def test_a_foreign_program_ends_when_the_bench_that_started_it_is_killed() -> None:
    """Its leash is the standard input of the process that watches over it."""
    watched = subprocess.Popen(
        [sys.executable, "-m", "ops.bench.peers", "sleep", "600"],
        stdin=subprocess.PIPE, cwd=prepare.ROOT, start_new_session=True,
    )  # fmt: skip
    assert watched.stdin is not None
    watcher = psutil.Process(watched.pid)
    (program,) = until(watcher.children, "the program")

    watched.stdin.close()

    psutil.wait_procs([program], timeout=10)
    assert not program.is_running()
    assert watched.wait(10) != 0


def test_the_engine_behind_the_peers_answers_as_vllm_does() -> None:
    """An answer's letters come in order; its tokens are counted for who asks; a prompt's tokens are told."""
    port = free_port("127.0.0.1", 0)
    argv = [sys.executable, "-m", "ops.bench.upstream", str(port), "5"]
    asked = {"model": "m", "stream": True, "max_tokens": 30, "stream_options": {"include_usage": True}}
    with subprocess.Popen(argv, stdin=subprocess.PIPE, cwd=prepare.ROOT):  # the end of its input is its own
        until(lambda: peers.answers(port, "any"), "the engine")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/v1/chat/completions") as client:
            lines = [line for line in client.post("", json=asked).text.split("\n\n") if line]
            rendered = client.post("/render", json=asked).json()

    assert lines.pop() == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert events.pop()["usage"]["completion_tokens"] == 30
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 31 + ["stop"]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "abcdefghijklmnopqrstuvwxyzabcd"
    assert rendered["token_ids"] == list(range(100, 116))


def test_a_load_without_streams_is_not_understood(tmp_path: Path) -> None:
    done = bench(tmp_path, "stream", "--streams", "0")

    assert done.returncode == 2
    assert "--streams" in done.stderr
    assert done.stdout == ""


def test_time_of_a_process_that_was_replaced_is_not_reported() -> None:
    """A new process begins at zero: the difference would be a figure, and a wrong one."""
    before = Cpu(gateway_s=5.0, worker_s=1.0, store_s=1.0, pids=frozenset({1, 2}))
    later = Cpu(gateway_s=7.5, worker_s=2.0, store_s=1.5, pids=frozenset({1, 2}))
    other = Cpu(gateway_s=0.5, worker_s=2.0, store_s=1.5, pids=frozenset({1, 3}))

    assert later.since(before).total_s == pytest.approx(4.0)
    with pytest.raises(BenchFailed):
        other.since(before)


def test_quantiles_are_values_that_occurred() -> None:
    values = array("d", range(100, 0, -1))

    assert (load.quantile(values, 0.5), load.quantile(values, 0.99)) == (51.0, 100.0)
    assert load.quantile(array("d"), 0.5) == 0.0


def test_a_report_is_one_object_in_a_file_or_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = report.measure("any", lambda say: ({"wait_ms_p99": 1.5}, {}))

    report.publish(measured, str(tmp_path / "out.json"))
    report.publish(measured, None)

    assert json.loads((tmp_path / "out.json").read_text())["figures"] == {"wait_ms_p99": 1.5}
    shown = capsys.readouterr().out
    assert "wait_ms_p99" in shown
    assert "1.5" in shown


def test_a_small_queue_bench_has_our_figures_beside_dramatiqs(tmp_path: Path) -> None:
    small = (
        "--starts",
        "5",
        "--look-s",
        "2",
        "--messages",
        "300",
        "--in-flight",
        "32",
        "--depths",
        "0",
        "--depths",
        "500",
    )
    done = bench(tmp_path, "queue", *small, "--json", "-")

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    ours, peers = found["figures"], found["peers"]
    scripts = ours.pop("script_us")
    assert set(ours) == QUEUE_KEYS | {"requests_per_s"}
    assert set(peers) == {"dramatiq", "dramatiq_bare"}
    assert all(set(peer) == QUEUE_KEYS for peer in peers.values())
    assert all(value > 0 for value in ours.values())
    assert ours["idle_commands_per_s"] <= 3
    assert ours["idle_start_ms_p50"] < peers["dramatiq"]["idle_start_ms_p50"]
    assert set(scripts) == {"enqueue", "claim", "claim_64", "beat_256", "watch_256", "finish", "finish_64"}
    assert all(set(us) == {"0", "500"} and min(us.values()) > 0 for us in scripts.values())
    assert list(tmp_path.iterdir()) == []


def test_nothing_overtakes_what_is_urgent(tmp_path: Path) -> None:
    """It starts in the first slot to be free, and a moment later: what one claim takes on a busy machine."""
    small = ("--low", "64", "--slots", "8", "--job-s", "0.3", "--urgent", "3")
    done = bench(tmp_path, "priority", *small, "--json", "-")

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    ours, peer = found["figures"], found["peers"]["dramatiq"]
    assert set(ours) == set(peer) == {"urgent_start_ms", "slot_remainder_ms", "overtakes"}
    assert ours["overtakes"] == 0
    assert 0 < ours["slot_remainder_ms"] <= 300
    assert ours["urgent_start_ms"] < ours["slot_remainder_ms"] + 200
    assert ours["urgent_start_ms"] < peer["urgent_start_ms"]


def test_tenants_that_wait_are_served_equal_tokens(tmp_path: Path) -> None:
    small = ("--seconds", "1.5", "--slots", "4", "--tenants", "10")
    done = bench(tmp_path, "fairness", *small, "--json", "-")

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    ours, fifo = found["figures"], found["peers"]["fifo"]
    assert set(ours) == set(fifo) == FAIRNESS_KEYS
    assert ours["service_gap_tokens"] <= ours["vtc_bound_tokens"] < fifo["service_gap_tokens"]
    assert ours["light_wait_ms_p99"] < fifo["light_wait_ms_p99"]
    assert ours["jain"] > max(0.9, fifo["jain"])


PREFIX_KEYS = {"cached_share_of_clairvoyant", "imbalance", "ttft_ms_p50", "ttft_ms_p99", "traces"}


def conversations(folder: Path, count: int, turns: int) -> None:
    """Traces of people who take turns with the service: each prompt is the one before it and two blocks more."""
    fresh = itertools.count(1)
    for trace in ("conversation", "synthetic"):
        said: dict[int, list[int]] = {person: [0] for person in range(count)}
        with (folder / f"mooncake_{trace}.jsonl").open("w") as lines:
            for turn, person in itertools.product(range(turns), range(count)):
                said[person] += [next(fresh), next(fresh)]
                row = {
                    "timestamp": 3000 * turn, "input_length": 512 * len(said[person]) - 100, "output_length": 50,
                    "hash_ids": said[person],
                }  # fmt: skip
                lines.write(json.dumps(row) + "\n")


def test_a_small_prefix_bench_finds_what_is_held_where_blind_placement_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversations(tmp_path, count=61, turns=5)
    monkeypatch.setenv("FOREBAY_TRACES", str(tmp_path))
    temporary = tmp_path / "tmp"
    temporary.mkdir()

    done = bench(temporary, "prefix", "--requests", "305", "--workers", "4", "--json", "-")

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    ours, peers = found["figures"], found["peers"]
    assert set(peers) == {"round_robin", "least_loaded"}
    assert all(set(figures) == PREFIX_KEYS for figures in (ours, *peers.values()))
    assert ours["cached_share_of_clairvoyant"] > 0.8 > max(p["cached_share_of_clairvoyant"] for p in peers.values())
    assert ours["imbalance"] < 1.5
    assert list(temporary.iterdir()) == []


def test_without_traces_the_prefix_bench_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_TRACES", str(tmp_path))

    done = bench(tmp_path, "prefix", "--json", "-")

    assert done.returncode != 0
    assert f"{tmp_path}/mooncake_conversation.jsonl" in done.stderr
    assert done.stdout == ""


def test_a_simulated_engine_finds_prefixes_and_gives_all_its_blocks_back() -> None:
    """The third prompt shares two blocks with the first, and of its own last one a token is computed anyway."""
    engine = SimulatedEngine(0, Profile(kv_tokens=4096, slots=4), block_tokens=512)
    total = engine.cache.free_tokens
    cached = []
    for n, hashes in enumerate([(1, 2, 3), (1, 4, 5), (1, 2), (9, 8, 7, 6, 5), (1, 2, 3)]):
        job = Job(n=n, arrived_ms=0.0, input_tokens=512 * len(hashes), output_tokens=3, hashes=hashes)
        engine.submit(job)
        ended: list[Job] = []
        while not ended:
            assert engine.begin() > 0
            ended = engine.end(now_ms=1.0)
        cached.append(job.cached_tokens)

    assert cached == [0, 512, 512, 0, 1024], "the fifth found its blocks still there: they were used last"
    assert engine.begin() == 0.0
    assert engine.cache.free_tokens == total


LIMITS_KEYS = {
    "us_per_call", "us_by_verb", "calls_per_s", "over_admitted_tokens", "race", "mint_tokens", "utilisation",
    "utilisation_by_mix", "streams_cut_by_rate", "gateways_1_vs_4",
}  # fmt: skip


def test_a_small_limits_bench_finds_nothing_past_a_limit(tmp_path: Path) -> None:
    small = ("--rounds", "2", "--race-s", "3", "--kills", "2", "--minutes", "1")
    done = bench(tmp_path, "limits", *small, "--json", "-")

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["figures"]
    assert set(found) == LIMITS_KEYS
    assert found["over_admitted_tokens"] == found["mint_tokens"] == found["streams_cut_by_rate"] == 0
    assert found["race"]["left_open"] == found["race"]["left_held"] == 0
    assert found["utilisation"] >= 0.95
    assert found["gateways_1_vs_4"]["1"] == found["gateways_1_vs_4"]["4"] > 0
    us = found["us_per_call"]
    assert set(us) == {"1", "4", "8"} and 0 < us["1"] < us["8"]
    assert set(found["us_by_verb"]["4"]) == {"reserve", "progress", "progress_of_100", "settle", "refused"}
    assert list(tmp_path.iterdir()) == []


def test_the_worst_minute_is_found_wherever_it_lies() -> None:
    """Tokens count once, at the time they were made; a debt allows for as many, for as long."""
    lines = [
        limits_clients.Line(at_ms, name, ("org",), tokens, 0, debt)
        for at_ms, name, tokens, debt in (
            (0, "a", 50, 0), (30_000, "a", 80, 0), (59_999, "b", 30, 0), (60_000, "b", 90, 20), (200_000, "c", 70, 0),
        )
    ]  # fmt: skip

    assert limits._worst_window(lines, 100) == (120, 10), (
        "30 and 90 in the minute from 1 ms on, less 20 and 100; 110 before it"
    )
    assert limits._worst_window(lines, 120) == (120, 0)
