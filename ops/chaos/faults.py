"""Which faults a run is given: every one at every exchange, or some at random that a seed can bring back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping
from typing import get_args

from ops.chaos.proxy import Fault, How, Proxy

HOWS: tuple[How, ...] = get_args(How)


def every(seen: Mapping[str, int], *, stall_s: float) -> Iterator[Fault]:
    """Each way to break each exchange of a life that was seen."""
    for what, count in sorted(seen.items()):
        for nth in range(1, count + 1):
            for how in HOWS:
                yield Fault(how=how, what=what, nth=nth, stall_s=stall_s)


async def at_random(proxy: Proxy, seed: int, *, every_s: float, stall_s: float) -> None:
    """Break one of the next exchanges, or cut every connection, again and again until cancelled."""
    dice = random.Random(seed)
    while True:
        await asyncio.sleep(dice.uniform(0.5, 1.5) * every_s)
        if dice.random() < 0.2 or not proxy.seen:
            proxy.reset_all()
        else:
            what = dice.choice(sorted(proxy.seen))
            proxy.plan(Fault(how=dice.choice(HOWS), what=what, nth=dice.randint(1, 2), stall_s=stall_s))
            await asyncio.sleep(0)
