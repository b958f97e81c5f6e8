"""`forebay bench`: measure this build."""

from __future__ import annotations

import click

#: The option that every bench has.
_json = click.option("--json", "file", metavar="FILE", help="Write one JSON object to FILE; - is standard output.")


@click.group()
def command() -> None:
    """Measure this build. Progress goes to standard error."""


@command.command()
@click.option("--streams", type=click.IntRange(1, 5000), default=128, show_default=True, help="Streams at once.")
@click.option("--tokens", type=click.IntRange(2, 100_000), default=500, show_default=True, help="Tokens per stream.")
@click.option("--seconds", type=click.FloatRange(0), default=0.0, help="Go on with new streams for so long.")
@click.option("--crowd", type=click.IntRange(1, 10_000), default=2000, show_default=True, help="At one process.")
@click.option("--peers", is_flag=True, help="Measure LiteLLM and vllm-router too; installs them if need be.")
@_json
def stream(streams: int, tokens: int, seconds: float, crowd: int, peers: bool, file: str | None) -> None:
    """What a streamed token, a request and an idle socket cost at the gateway.

    Runs a platform of its own on the scripted engine, in a temporary folder; needs neither a model nor a store.
    """
    from functools import partial

    from ops import show
    from ops.bench import report
    from ops.bench import stream as bench
    from ops.bench.platform import BenchFailed

    options = bench.Options(streams=streams, tokens=tokens, seconds=seconds, crowd=crowd, peers=peers)
    with show.refusals(BenchFailed):
        found = report.measure("stream", partial(bench.figures, options))
    report.publish(found, file)


@command.command()
@click.option("--messages", type=click.IntRange(100, 1_000_000), default=10_000, show_default=True)
@click.option("--starts", type=click.IntRange(5, 10_000), default=40, show_default=True, help="Idle starts measured.")
@click.option("--in-flight", type=click.IntRange(1, 1024), default=256, show_default=True)
@click.option("--depths", "--depth", "depths", type=int, multiple=True, default=(0, 100_000), show_default=True)
@click.option("--look-s", type=click.FloatRange(0.5, 60), default=5.0, show_default=True, help="At an idle worker.")
@_json
def queue(messages: int, starts: int, in_flight: int, depths: tuple[int, ...], look_s: float, file: str | None) -> None:
    """How soon an idle worker starts a task and how many it gets through, beside Dramatiq's stock RedisBroker."""
    from functools import partial

    from ops.bench import queue as bench
    from ops.bench import report

    options = bench.Options(messages=messages, starts=starts, in_flight=in_flight, depths=depths, look_s=look_s)
    report.publish(report.measure("queue", partial(bench.figures, options)), file)


@command.command()
@click.option("--streams", type=click.IntRange(2, 1000), default=100, show_default=True, help="Streams at once.")
@click.option("--kills", type=click.IntRange(0, 1000), default=20, show_default=True, help="Reported by the agent.")
@click.option("--lease-kills", type=click.IntRange(0, 1000), default=5, show_default=True, help="Found by the lease.")
@click.option("--outage", "outages_s", type=float, multiple=True, default=(4.0, 20.0), show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@_json
def handover(
    streams: int, kills: int, lease_kills: int, outages_s: tuple[float, ...], seed: int, file: str | None
) -> None:
    """What clients see when workers are killed under their streams, and when the store stops for a while."""
    from functools import partial

    from ops import show
    from ops.bench import handover as bench
    from ops.bench import report
    from ops.bench.platform import BenchFailed

    options = bench.Options(streams=streams, kills=kills, lease_kills=lease_kills, outages_s=outages_s, seed=seed)
    with show.refusals(BenchFailed):
        found = report.measure("handover", partial(bench.figures, options))
    report.publish(found, file)


@command.command()
@click.option("--low", type=click.IntRange(2, 100_000), default=400, show_default=True, help="Low jobs in front.")
@click.option("--slots", type=click.IntRange(1, 1024), default=64, show_default=True, help="Jobs at once.")
@click.option("--job-s", type=click.FloatRange(0.05, 60), default=1.0, show_default=True)
@click.option("--urgent", type=click.IntRange(1, 100), default=5, show_default=True, help="Urgent ones, one by one.")
@_json
def priority(low: int, slots: int, job_s: float, urgent: int, file: str | None) -> None:
    """How soon something urgent starts behind a long queue, beside Dramatiq's stock RedisBroker."""
    from functools import partial

    from ops import show
    from ops.bench import priority as bench
    from ops.bench import report
    from ops.bench.platform import BenchFailed

    options = bench.Options(low=low, slots=slots, job_s=job_s, urgent=urgent)
    with show.refusals(BenchFailed):
        found = report.measure("priority", partial(bench.figures, options))
    report.publish(found, file)


@command.command()
@click.option("--seconds", type=click.FloatRange(0.5, 600), default=8.0, show_default=True, help="Of each scene.")
@click.option("--workers", type=click.IntRange(1, 16), default=2, show_default=True)
@click.option("--slots", type=click.IntRange(1, 256), default=8, show_default=True, help="Of each worker.")
@click.option("--tenants", type=click.IntRange(2, 1000), default=50, show_default=True)
@_json
def fairness(seconds: float, workers: int, slots: int, tenants: int, file: str | None) -> None:
    """Who gets how many tokens when more is asked for than there is, beside first come, first served."""
    from functools import partial

    from ops.bench import fairness as bench
    from ops.bench import report

    options = bench.Options(seconds=seconds, workers=workers, slots=slots, tenants=tenants)
    report.publish(report.measure("fairness", partial(bench.figures, options)), file)


@command.command()
@click.option("--requests", type=click.IntRange(100), default=3000, show_default=True, help="Of each trace.")
@click.option("--workers", type=click.IntRange(2, 64), default=8, show_default=True)
@click.option("--load", type=click.FloatRange(0.05, 2), default=0.7, show_default=True, help="Of what they can do.")
@click.option("--scan", type=click.IntRange(1), help="Requests of a tenant that a claim looks through.")
@click.option("--steal-ms", type=click.IntRange(0), help="How long a request waits for its holders at most.")
@_json
def prefix(requests: int, workers: int, load: float, scan: int | None, steal_ms: int | None, file: str | None) -> None:
    """How much of the Mooncake traces' prompts is found in a cache, beside round robin and least loaded.

    The engines are simulated, in virtual time; block hashes, index, router and queue are real. The traces are looked
    for in FOREBAY_TRACES.
    """
    from functools import partial

    from ops import show
    from ops.bench import prefix as bench
    from ops.bench import report
    from ops.bench.platform import BenchFailed
    from tasks.queue import SCAN, STEAL_MS

    options = bench.Options(
        requests=requests,
        workers=workers,
        load=load,
        scan=scan or SCAN,
        steal_ms=STEAL_MS if steal_ms is None else steal_ms,
    )
    with show.refusals(BenchFailed):
        found = report.measure("prefix", partial(bench.figures, options))
    report.publish(found, file)


@command.command()
@click.option("--rounds", type=click.IntRange(1, 1000), default=12, show_default=True, help="Of each measurement.")
@click.option("--race-s", type=click.FloatRange(2, 3600), default=20.0, show_default=True)
@click.option("--kills", type=click.IntRange(0, 1000), default=12, show_default=True, help="Of client processes.")
@click.option("--minutes", type=click.IntRange(1, 600), default=8, show_default=True, help="Simulated, of each mix.")
@click.option("--seed", type=int, default=1, show_default=True)
@_json
def limits(rounds: int, race_s: float, kills: int, minutes: int, seed: int, file: str | None) -> None:
    """What a call of the limiter costs, how much gets past it (nothing), and how much of a limit is used."""
    from functools import partial

    from ops.bench import limits as bench
    from ops.bench import report

    options = bench.Options(rounds=rounds, race_s=race_s, kills=kills, minutes=minutes, seed=seed)
    report.publish(report.measure("limits", partial(bench.figures, options)), file)
