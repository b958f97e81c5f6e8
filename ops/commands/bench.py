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
@_json
def stream(streams: int, tokens: int, seconds: float, file: str | None) -> None:
    """What a streamed token, a request and an idle socket cost at the gateway.

    Runs a platform of its own on the scripted engine, in a temporary folder; needs neither a model nor a store.
    """
    from functools import partial

    from ops import show
    from ops.bench import report
    from ops.bench import stream as bench
    from ops.bench.platform import BenchFailed

    options = bench.Options(streams=streams, tokens=tokens, seconds=seconds)
    with show.refusals(BenchFailed):
        found = report.measure("stream", partial(bench.figures, options))
    report.publish(found, file)


@command.command()
@click.option("--messages", type=click.IntRange(100, 1_000_000), default=10_000, show_default=True)
@click.option("--starts", type=click.IntRange(5, 10_000), default=40, show_default=True, help="Idle starts measured.")
@click.option("--in-flight", type=click.IntRange(1, 1024), default=256, show_default=True)
@click.option("--depth", "depths", type=int, multiple=True, default=(0, 100_000), show_default=True)
@_json
def queue(messages: int, starts: int, in_flight: int, depths: tuple[int, ...], file: str | None) -> None:
    """How soon an idle worker starts a task and how many it gets through, beside Dramatiq's stock RedisBroker."""
    from functools import partial

    from ops.bench import queue as bench
    from ops.bench import report

    options = bench.Options(messages=messages, starts=starts, in_flight=in_flight, depths=depths)
    report.publish(report.measure("queue", partial(bench.figures, options)), file)
