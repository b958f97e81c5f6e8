"""A gateway's pump under gevent, while workers publish as fast as they can: how long everybody else waits for a turn.

`python -m tests.web.crowded URL` prints the longest wait in ms. A process of its own, since it is patched.
"""

from gevent import monkey

monkey.patch_all()

import subprocess  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402

from core.catalog import Model  # noqa: E402
from core.redis import Store  # noqa: E402
from core.stream.frames import Delta, Frame, encode  # noqa: E402
from core.stream.log import publish  # noqa: E402
from core.values import Caller, Request, Sampling  # noqa: E402
from web.subscriber import Subscriber  # noqa: E402

STREAMS, FRAMES = 32, 4000


def flood(url: str) -> None:
    """All at once, as after a stall: one delta of each stream in a frame, as a worker's step has."""
    frames = [tuple(Delta(str(one), 1, n, (97,), "a", n) for one in range(STREAMS)) for n in range(FRAMES)]
    Store.connect(url).run_all([publish("m", "g", encode(Frame(worker="w", deltas=deltas))) for deltas in frames])


def longest_wait_ms(url: str) -> float:
    subscriber = Subscriber(Store.connect(url), url, {"m": Model(context_tokens=1000)}, "g")
    made = Caller(org_id="o", project_id="p", key_id="k")
    streams = [
        subscriber.open(
            Request(
                id=str(n), model="m", caller=made, gateway="g", prompt_token_ids=[1], sampling=Sampling(max_tokens=9)
            )
        )
        for n in range(STREAMS)
    ]
    threading.Thread(target=subscriber.pump, daemon=True).start()
    subscriber.listening.wait(10)
    longest_s = 0.0
    with subprocess.Popen([sys.executable, "-m", "tests.web.crowded", url, "flood"]) as publisher:
        while publisher.poll() is None or len(streams[0].tokens) < FRAMES:
            began_s = time.monotonic()
            time.sleep(0.002)
            longest_s = max(longest_s, time.monotonic() - began_s)
    return longest_s * 1000


if __name__ == "__main__":
    if sys.argv[2:] == ["flood"]:
        flood(sys.argv[1])
    else:
        print(longest_wait_ms(sys.argv[1]))
