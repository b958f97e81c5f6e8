"""`forebay up`: its parts, and one life of it with a gateway of three lines in the real one's place."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from billing import prices
from core import settings as environment
from core.accounts import keys
from core.postgres import connect, migrate, text, transaction
from core.redis import Store
from core.settings import Settings
from ops import demo, prepare, up
from ops.logs import Logs, error_in

#: How long a test waits for a real process, seconds. Only a failing test waits so long.
PATIENCE_S = 60.0

GATEWAY = """
import http.server, json, os
from core.supervise import follow_parent
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"ready": True}).encode())
    def log_message(self, *_):
        pass
follow_parent()
http.server.HTTPServer(("127.0.0.1", int(os.environ["FOREBAY_PORT"])), Ready).serve_forever()
"""
WORKER = """
import json, os, sys, time
from core.supervise import follow_parent
follow_parent()
print(json.dumps({"level": "error", "event": "worker_sees", "error": str("DATABASE_URL" in os.environ)}), flush=True)
time.sleep(1000)
"""


class Life:
    """`forebay up` as a process, with a Procfile of the test's own."""

    def __init__(self, data: Path, *, release: str = "python -m ops.cli migrate", database_url: str = "") -> None:
        self.ready_file = data / "ready.json"
        (data / "gateway.py").write_text(GATEWAY)
        (data / "worker.py").write_text(WORKER)
        (data / "Procfile").write_text(
            f"release: {release}\nweb: python {data}/gateway.py\nworker: python {data}/worker.py\n"
        )
        (data / "models.toml").write_text('[models."scripted"]\ntokenizer = "bytes"\ncontext_tokens = 2048\n')
        program = (
            "import pathlib, ops.up, ops.cli; "
            f"ops.up._PROCFILE = pathlib.Path({str(data / 'Procfile')!r}); ops.cli.cli(['up'])"
        )
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("FOREBAY_", "REDIS_", "DATAB"))
        }
        told = {"FOREBAY_DATA": str(data), "FOREBAY_PORT": "0", "FOREBAY_ENGINE": "scripted", "FOREBAY_DRAIN_S": "2"}
        told["FOREBAY_CATALOG"] = str(data / "models.toml")
        told["DATABASE_URL"] = database_url
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            env=kept | told | {"PYTHONPATH": str(prepare.ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ready(self) -> dict[str, object]:
        deadline = time.monotonic() + PATIENCE_S
        while not self.ready_file.exists():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "it did not become ready"
            time.sleep(0.02)
        ready: dict[str, object] = json.loads(self.ready_file.read_text())
        return ready

    def end(self) -> tuple[str, str]:
        self.process.send_signal(signal.SIGTERM)
        return self.process.communicate(timeout=PATIENCE_S)


def running(pids: dict[str, int]) -> list[str]:
    """Those that still run."""
    return [name for name, pid in pids.items() if _state(pid) != "Z"]


def _state(pid: int) -> str:
    """What the kernel says of a process; a zombie and one that is gone are the same here."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def test_two_lives_of_the_platform_share_a_key_and_leave_no_process(data: Path) -> None:
    """`ready.json` has exactly the promised keys and mode; SIGTERM ends all that it names, the stores too, and it."""
    folder = data / "up"
    folder.mkdir()
    first = Life(folder)
    ready = first.ready()
    mode = stat.S_IMODE(first.ready_file.stat().st_mode)
    second_at_once = subprocess.run(
        [sys.executable, "-m", "ops.cli", "up"],
        env=os.environ | {"FOREBAY_DATA": str(folder), "FOREBAY_ENGINE": "scripted"},
        capture_output=True, text=True, timeout=PATIENCE_S, cwd=prepare.ROOT,
    )  # fmt: skip
    shown, told = first.end()

    second = Life(folder)
    ready_again = second.ready()
    second.end()

    assert set(ready) == {
        "url", "admin_url", "api_key", "admin_key", "model", "redis_url", "database_url", "pids"
    }  # fmt: skip
    assert (mode, first.process.returncode, second.process.returncode) == (0o600, 0, 0)
    assert set(ready["pids"]) == {"up", "valkey", "postgres", "web", "worker"}  # type: ignore[call-overload]
    assert running(ready["pids"]) == running(ready_again["pids"]) == []  # type: ignore[arg-type]
    assert ready_again["api_key"] == ready["api_key"]
    assert not first.ready_file.exists()
    assert str(ready["api_key"]) in shown
    assert "worker: worker_sees: False" in told  # an error of its log; and it has no key to the money
    assert second_at_once.returncode == 1
    assert "already up" in second_at_once.stderr


def test_a_store_that_dies_is_started_again_with_what_it_held(data: Path) -> None:
    """Both are killed at once; `ready.json` names the new processes, and the end leaves none of them."""
    folder = data / "stores"
    folder.mkdir()
    life = Life(folder)
    before = life.ready()
    store = Store.connect(str(before["redis_url"]))
    store.client.set("kept", "yes")
    store.client.execute_command("WAITAOF", 1, 0, 5000)
    pids: dict[str, int] = before["pids"]  # type: ignore[assignment]

    for name in ("valkey", "postgres"):
        os.kill(pids[name], signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    while not (after := _pids(life)) or any(after[name] == pids[name] for name in ("valkey", "postgres")):
        assert time.monotonic() < deadline, "they did not come back"
        time.sleep(0.05)

    assert store.client.get("kept") == b"yes"
    engine = connect(str(before["database_url"]))
    with transaction(engine) as connection:
        assert connection.execute(text("SELECT count(*) FROM api_keys")).scalar_one() >= 1
    engine.dispose()
    store.close()
    assert after["web"] == pids["web"]
    life.end()
    assert running(after) == []


def _pids(life: Life) -> dict[str, int]:
    try:
        found: dict[str, int] = json.loads(life.ready_file.read_text())["pids"]
    except (FileNotFoundError, ValueError):
        return {}
    return found


def test_a_signal_while_it_starts_ends_it_too(data: Path) -> None:
    """Ctrl-C does not wait for the gateway: the release step is ended, and the store that ran by then is stopped."""
    folder = data / "early"
    folder.mkdir()
    life = Life(folder, release="sleep 1000", database_url="postgresql://nobody@127.0.0.1:1/none")
    assert life.process.stderr is not None
    while "Migrating" not in life.process.stderr.readline():
        assert life.process.poll() is None

    life.end()

    assert life.process.returncode == 0
    assert not life.ready_file.exists()
    assert not list(folder.glob("**/valkey.pid"))


def test_secrets_are_made_once_and_only_we_may_read_them(tmp_path: Path) -> None:
    settings = Settings(data=tmp_path)

    demo.make_secrets(settings)
    first = {path.name: path.read_text() for path in settings.secrets.iterdir()}
    demo.make_secrets(settings)
    second = {path.name: path.read_text() for path in settings.secrets.iterdir()}

    assert first == second
    assert set(first) == {"pepper", "salt"}
    assert first["pepper"] != first["salt"]
    assert stat.S_IMODE(settings.secrets.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in settings.secrets.iterdir()} == {0o600}


def test_the_demo_key_is_one_that_gateways_know_at_once(tmp_path: Path, valkey_url: str, empty_database: str) -> None:
    """It is kept and shown again; for a database that never saw it a new one is made."""
    settings = Settings(data=tmp_path, redis_url=valkey_url, database_url=empty_database)
    migrate(empty_database)
    demo.make_secrets(settings)
    stranger = keys.mint("live", "AAAAAAAAAAAA")
    (settings.secrets / "demo_key").write_text(stranger)

    first = demo.key(settings)
    second = demo.key(settings)

    parsed = keys.parse(first)
    engine, store = connect(empty_database), Store.connect(valkey_url)
    record, found = store.run(keys.read(parsed.key_id)), keys.find(engine, parsed.key_id)
    assert first == second != stranger
    assert record is not None and found is not None
    assert record == msgspec.structs.replace(found, read_us=record.read_us)
    assert keys.matches(parsed, record, keys.pepper(settings))
    engine.dispose()
    store.close()


def test_a_demo_model_has_a_price_and_keeps_it(tmp_path: Path, valkey_url: str, empty_database: str) -> None:
    """A price that somebody has set is not set again."""
    settings = Settings(data=tmp_path, redis_url=valkey_url, database_url=empty_database)
    migrate(empty_database)

    demo.price(settings, ["a", "b"])
    store = Store.connect(valkey_url)
    first = store.run(prices.read("a"))
    demo.price(settings, ["a", "b"])

    assert first is not None and first.output_per_mtok == demo.OUTPUT_PER_MTOK
    assert store.run(prices.read("a")) == first
    store.close()


def test_a_worker_holds_no_key_to_the_money() -> None:
    """Its environment lacks the database and the pepper; the others have what is really used."""
    settings = Settings(data=Path("/d"), redis_url="r", database_url="d", port=7)
    environ = {"PATH": "/bin", "DATABASE_URL": "old", "FOREBAY_PEPPER": "p", "FOREBAY_PORT": "0"}

    worker = up.environment(environ, settings, "worker")
    web = up.environment(environ, settings, "web")

    assert {"DATABASE_URL", "FOREBAY_PEPPER"} & set(worker) == set()
    assert (web["DATABASE_URL"], web["FOREBAY_PEPPER"], web["FOREBAY_PORT"]) == ("d", "p", "7")
    assert environment.read(web).supervised
    assert worker["PATH"] == "/bin"


def test_port_0_is_a_free_one_and_a_taken_one_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()

        with pytest.raises(up.NotUp, match="FOREBAY_PORT"):
            up.free_port("127.0.0.1", taken.getsockname()[1])
        assert up.free_port("127.0.0.1", 0) not in (0, taken.getsockname()[1])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"store": false, "models": {}}', "the gateway does not reach Redis"),
        (b'{"store": true, "models": {"a": {"ready": 0, "workers": []}}}', "a: no worker yet"),
        (
            b'{"store": true, "models": {"a": {"ready": 0, "workers": [{"state": "loading", "detail": "40 %"}]},'
            b' "b": {"ready": 1, "workers": [{"state": "ready"}]}}}',
            "a: loading 40 %",
        ),
        (b'{"store": true, "models": {}}', "the gateway is not listening yet"),
        (b"<html>odd</html>", "<html>odd</html>"),
        (b"[]", "[]"),
        (b"", "the gateway is not ready"),
    ],
)
def test_people_are_told_what_the_gateway_waits_for(body: bytes, said: str) -> None:
    assert up.waiting_for(body) == said


def test_the_examples_are_commands_that_a_shell_takes_apart_as_meant() -> None:
    """Pasted, each is one command; an address that cannot be connected to is not shown."""
    settings = Settings(bind="0.0.0.0", port=8123)
    text = up.welcome(settings, key="fb_live_x_y", model="m")
    curl, python = (shlex.split(line) for line in text.splitlines() if line.startswith(("curl", "/", "'/")))

    assert json.loads(curl[curl.index("-d") + 1])["model"] == "m"
    assert "http://127.0.0.1:8123/v1/chat/completions" in curl
    compile(python[2], "example", "exec")
    assert "0.0.0.0" not in text


def test_a_logged_error_is_shown_once_and_nothing_else(tmp_path: Path) -> None:
    """Only whole lines of this life that say error or critical, each told once."""
    (tmp_path / "web.log").write_text('{"level": "error", "event": "of_an_earlier_life"}\n')
    logs = Logs(tmp_path)
    path = logs.open("web")
    with path.open("a") as log:
        log.write('{"level": "info", "event": "fine"}\nplain text\n{"level": "error", "event": "broke", "err')
    half = list(logs.errors())
    with path.open("a") as log:
        log.write('or": "disk full"}\n')

    assert half == []
    assert list(logs.errors()) == [("web", "broke: disk full")]
    assert list(logs.errors()) == []
    assert error_in(b'{"level": "info", "event": "the word \\"error\\""}') is None
