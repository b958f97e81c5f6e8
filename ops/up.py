"""`forebay up`: everything on one machine, from an empty folder to a ready gateway, and gone without a trace.

In order: secrets, stores, the `release` line, the demo key, the Procfile's processes under the supervisor, and a look
at the gateway until it is ready. At the end the reverse: the gateway drains while workers still serve what it
accepted, then the others, and last the stores. One `up` per data folder; a lock sees to that.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from core import catalog, postgres, supervise
from core.redis import RedisError
from core.settings import WITHHELD, Settings
from ops import demo, prepare, stores
from ops.logs import Logs

#: How long the gateway may take to be ready, seconds. A large model on a slow disk is loaded in less.
READY_S = 1800.0
LOOK_S = 0.2
#: A silent wait says that it is still there, seconds.
SAY_S = 10.0
#: Pause before a store that did not come back is started again, seconds.
STORE_PAUSE_S = 2.0

_PROCFILE = Path(__file__).resolve().parent.parent / "Procfile"


class NotUp(Exception):
    """The platform cannot start here."""


class _Stopped(Exception):
    """A signal came before the platform was ready."""


def up(settings: Settings, environ: Mapping[str, str]) -> None:
    """Start everything, stay until SIGINT or SIGTERM, and leave no process behind.

    Raises:
      NotUp: with what to do about it.
    """
    settings = settings.model_copy(update={"data": settings.data.resolve()})
    settings.data.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _only_one(settings.data), ExitStack() as stack:
        try:
            _Platform(settings, environ, stack).live()
        except stores.StoreFailed as e:
            raise NotUp(str(e)) from e


class _Platform:
    """One life of the platform. `stack` ends what was started, last first, whatever happens."""

    def __init__(self, settings: Settings, environ: Mapping[str, str], stack: ExitStack) -> None:
        self.settings = settings
        self.environ = environ
        self.stack = stack
        self.console = Console(stderr=True, highlight=False)
        self.pids: dict[str, int] = {"up": os.getpid()}
        self.stores: dict[str, tuple[stores.Embedded, Callable[[Path], stores.Embedded]]] = {}
        self._stores_at_mono = 0.0
        self.signals = 0
        self.mourned: set[str] = set()
        # The host agent waits as long and a grace for its workers, and is waited for in its turn.
        limit_s = settings.drain_s + 2 * supervise.GRACE_S
        self.supervisor = supervise.Supervisor(drain_s=limit_s, died=self._died)
        self.logs = Logs(settings.data / "logs")

    def live(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self.stack.callback(signal.signal, number, signal.signal(number, self._signalled))
        (self.settings.data / "ready.json").unlink(missing_ok=True)  # of a life that was killed
        try:
            self._start()
            self._stay()
        except _Stopped:
            pass
        # The stack stops the rest. From here on the supervisor's own bound, the drain limit, is what ends the wait.

    def _start(self) -> None:
        models = self._models()
        demo.make_secrets(self.settings)
        self._change(port=free_port(self.settings.bind, self.settings.port))
        self._start_stores()
        commands = procfile()
        self._release(commands.pop("release", None))
        key, self.admin_key = self._make_demo(models)
        self.stack.callback(self._stop_processes, tuple(commands))
        for name, argv in commands.items():
            self.supervisor.keep(self._process(name, argv))
        self._wait_ready()
        self.stack.callback((self.settings.data / "ready.json").unlink, missing_ok=True)
        self._announce(key, models[0])
        print(welcome(self.settings, key=key, model=models[0]), flush=True)
        self.key, self.model = key, models[0]

    def _stay(self) -> None:
        pids = self._all_pids()
        while not self.signals:
            self.supervisor.tend()
            self._tend_stores()
            self._show_errors()
            if pids != (pids := self._all_pids()):
                self._announce(self.key, self.model)
            time.sleep(LOOK_S)

    def _models(self) -> list[str]:
        try:
            found = catalog.load(self.settings.catalog).only(self.settings.models)
        except catalog.BadCatalog as e:
            raise NotUp(str(e)) from e
        if not found:
            raise NotUp("the catalogue has no model to serve")
        if any(self._needs_files(model) for model in found.values()):
            try:
                prepare.make_model(self.settings.data)
            except prepare.NotPrepared as e:
                raise NotUp(str(e)) from e
        return list(found)

    def _needs_files(self, model: catalog.Model) -> bool:
        """Whether it is the local model, and more of it is used than its name. The gateway needs its tokenizer."""
        local = model.weights == f"local:{prepare.MODEL}"
        return local and (self.settings.engine != "scripted" or not model.tokenizer)

    def _start_stores(self) -> None:
        for name, field, start in (
            ("valkey", "redis_url", stores.start_valkey),
            ("postgres", "database_url", stores.start_postgres),
        ):
            if getattr(self.settings, field):
                continue
            self._going_on(f"Starting {name}")
            self._start_store(name, start)
            self.stack.callback(self._stop_store, name)
            self._change(**{field: self.stores[name][0].url})

    def _start_store(self, name: str, start: Callable[[Path], stores.Embedded]) -> None:
        store = start(self.settings.data)
        self.stores[name] = (store, start)
        self.pids[name] = store.pid

    def _tend_stores(self) -> None:
        """A store of ours that has ended is started again, on what it has written; the others wait for it meanwhile."""
        if time.monotonic() < self._stores_at_mono:
            return
        for name, (store, start) in list(self.stores.items()):
            if not store.has_ended():
                continue
            self._say(f"{name} ended and is started again")
            try:
                self._start_store(name, start)
            except (stores.StoreFailed, OSError, subprocess.SubprocessError) as e:
                self._say(f"{name} did not start: {e}")
                self._stores_at_mono = time.monotonic() + STORE_PAUSE_S

    def _release(self, argv: tuple[str, ...] | None) -> None:
        """Run the release line to its end: no process of a new release meets the old schema."""
        if argv is None:
            return
        self._going_on("Migrating the database")
        process = self._process("release", argv)
        assert process.log is not None
        with process.log.open("ab") as log:
            done = subprocess.Popen(process.argv, env=process.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            while (status := done.poll()) is None:
                if self.signals:
                    done.terminate()
                time.sleep(LOOK_S / 4)
        if status and not self.signals:
            raise NotUp(f"the release step failed ({status}):\n{self.logs.last_words('release')}")
        self._going_on()

    def _make_demo(self, models: Sequence[str]) -> tuple[str, str]:
        try:
            demo.price(self.settings, models)
            return demo.key(self.settings), demo.key(self.settings, "admin")
        except (postgres.DatabaseAway, RedisError) as e:
            raise NotUp(f"the demo key cannot be made: {e}") from e

    def _wait_ready(self) -> None:
        self._going_on("Starting " + ", ".join(sorted(self.supervisor.names())))
        start_mono = said_mono = time.monotonic()
        waiting = said = ""
        with self.console.status("starting") as status:
            while True:
                self.supervisor.tend()
                self._tend_stores()
                self._show_errors()
                ready, waiting = look(self.settings.bind, self.settings.port)
                passed_s = time.monotonic() - start_mono
                if ready:
                    return
                if passed_s > READY_S:
                    raise NotUp(f"not ready after {READY_S:.0f} s: {waiting}; the logs are in {self.logs.folder}")
                status.update(f"{passed_s:.0f} s: {escape(waiting)}")
                if not self.console.is_terminal and (waiting != said or time.monotonic() - said_mono > SAY_S):
                    said, said_mono = waiting, time.monotonic()
                    self._going_on(f"  {passed_s:3.0f} s: {waiting}")
                self._going_on()
                time.sleep(LOOK_S)

    def _stop_processes(self, names: tuple[str, ...]) -> None:
        """The gateway first: while it drains, workers still serve what it accepted."""
        self._say(f"Draining for up to {self.settings.drain_s:.0f} s; Ctrl-C again to stop at once")
        if "web" in names:
            self.supervisor.stop("web")
        self.supervisor.stop()
        self._say("Every process has ended")

    def _stop_store(self, name: str) -> None:
        self._say(f"Stopping {name}")
        store, _ = self.stores[name]
        with suppress(stores.StoreFailed) if store.has_ended() else nullcontext():
            store.stop()

    def _process(self, name: str, argv: tuple[str, ...]) -> supervise.Process:
        env = environment(self.environ, self.settings, name)
        log = self.logs.open(name)
        return supervise.Process(name=name, argv=supervise.with_python(argv, sys.executable), env=env, log=log)

    def _announce(self, key: str, model: str) -> None:
        """`ready.json`: what scripts and tests read. Written anew when a process was started again."""
        ready = {
            "url": url(self.settings), "admin_url": url(self.settings), "api_key": key, "admin_key": self.admin_key,
            "model": model,
            "redis_url": self.settings.redis_url, "database_url": self.settings.database_url,
            "pids": self._all_pids(),
        }  # fmt: skip
        demo.publish(self.settings.data / "ready.json", json.dumps(ready, indent=1) + "\n")

    def _all_pids(self) -> dict[str, int]:
        return self.pids | self.supervisor.pids()

    def _change(self, **fields: Any) -> None:
        self.settings = self.settings.model_copy(update=fields)

    def _died(self, death: supervise.Death) -> None:
        if not death.asked:
            self._say(f"{death.name} ended ({death.status}) and is started again; see {self.logs.path(death.name)}")
            if death.name not in self.mourned:  # once: the next ones are most likely the same
                self._say(self.logs.last_words(death.name))
            self.mourned.add(death.name)
        elif death.status == -signal.SIGKILL:
            self._say(f"{death.name} did not end in time and was killed")

    def _show_errors(self) -> None:
        for name, line in self.logs.errors():
            self._say(f"{name}: {line}")

    def _signalled(self, number: int, frame: object) -> None:
        self.signals += 1
        if self.signals > 1:
            self.supervisor.hurry()

    def _going_on(self, text: str = "") -> None:
        """Say what comes next, unless a signal says that nothing does."""
        if self.signals:
            raise _Stopped
        if text:
            self._say(text)

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)


def procfile() -> dict[str, tuple[str, ...]]:
    try:
        return supervise.procfile(_PROCFILE.read_text())
    except (OSError, supervise.BadProcfile) as e:
        raise NotUp(f"{_PROCFILE}: {e}") from e


def environment(environ: Mapping[str, str], settings: Settings, name: str) -> dict[str, str]:
    """The environment of one process: ours, with the stores, the folder and the port that are really used."""
    told = {
        "REDIS_URL": settings.redis_url,
        "DATABASE_URL": settings.database_url,
        "FOREBAY_DATA": str(settings.data),
        "FOREBAY_PORT": str(settings.port),
        "FOREBAY_SUPERVISED": "1",
    }
    return {key: value for key, value in {**environ, **told}.items() if name != "worker" or key not in WITHHELD}


def free_port(bind: str, port: int) -> int:
    """The port to listen on: the one asked for if it is free, any free one for 0."""
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((bind, port))
        except OSError as e:
            raise NotUp(f"port {port} on {bind}: {e.strerror}. Set FOREBAY_PORT to another one, or to 0") from e
        return int(probe.getsockname()[1])


def url(settings: Settings) -> str:
    return f"http://{_reachable(settings.bind)}:{settings.port}"


def _reachable(bind: str) -> str:
    """An address to connect to, for one to listen on."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(bind, bind)
    return f"[{host}]" if ":" in host else host


def look(bind: str, port: int) -> tuple[bool, str]:
    """Whether the gateway is ready, else what it waits for."""
    connection = http.client.HTTPConnection(_reachable(bind).strip("[]"), port, timeout=1)
    try:
        connection.request("GET", "/ready")
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException):
        return False, "the gateway does not answer yet"
    finally:
        connection.close()
    return response.status == 200, waiting_for(body)


def waiting_for(body: bytes) -> str:
    """What a /ready that is not 200 says, for people; another server's answer is shown as it is."""
    try:
        said = json.loads(body)
        if not said["store"]:
            return "the gateway does not reach Redis"
        unready = [
            f"{name}: {_workers(state['workers'])}" for name, state in said["models"].items() if not state["ready"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        return body.decode(errors="replace").strip()[:200] or "the gateway is not ready"
    return "; ".join(unready) or "the gateway is not listening yet"


def _workers(workers: list[dict[str, str]]) -> str:
    """How far a model's workers are."""
    if not workers:
        return "no worker yet"
    return ", ".join(f"{worker['state']} {worker.get('detail') or ''}".strip() for worker in workers)


def welcome(settings: Settings, *, key: str, model: str) -> str:
    """What to do next. Both examples work when pasted."""
    question = "What is the capital of France?"
    body = {"model": model, "stream": True, "temperature": 0, "messages": [{"role": "user", "content": question}]}
    curl = ["curl", "-sN", f"{url(settings)}/v1/chat/completions", "-H", f"Authorization: Bearer {key}",
            "-H", "Content-Type: application/json", "-d", json.dumps(body)]  # fmt: skip
    ends = '("response.completed", "response.incomplete", "response.failed", "error")'
    program = (
        f'from itertools import takewhile; from openai import OpenAI; '
        f'socket = OpenAI(base_url="{url(settings)}/v1", api_key="{key}").responses.connect().enter(); '
        f'socket.response.create(model="{model}", input="{question}", temperature=0); '
        f'answer = takewhile(lambda event: event.type not in {ends}, socket); '
        f'[print(getattr(event, "delta", ""), end="", flush=True) for event in answer]; '
        f"print(); socket.close()"
    )  # fmt: skip
    return f"""
Forebay is ready.

  URL      {url(settings)}/v1
  API key  {key}
  model    {model}
  data     {settings.data}
  logs     {settings.data / "logs"}

Over HTTP:

{shlex.join(curl)}

Over a WebSocket:

{shlex.join([sys.executable, "-c", program])}

Ctrl-C drains and stops everything.
"""


@contextmanager
def _only_one(data: Path) -> Iterator[None]:
    """Hold the data folder. The lock goes with this process, however it ends."""
    with (data / "up.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise NotUp(f"Forebay is already up in {data}; see {data / 'ready.json'}") from None
        yield
