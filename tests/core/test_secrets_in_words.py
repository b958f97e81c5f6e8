"""A key is in no error and in no log line, whoever put it there."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.accounts import keys, secrets
from core.errors import BadRequest, ClassShed, UnknownModel, without_secrets

KINDS = ("live", "test", "admin")
KEYS = [keys.mint(kind, "A" * keys.ID_LENGTH) for kind in KINDS]


@pytest.mark.parametrize(
    "secret", [*KEYS, secrets.mint(), "fb_live_" + "x" * 50], ids=[*KINDS, "client's", "longer"]
)  # named, for every process of a test run makes its own
@given(before=st.text(" `'\"/=:,(", max_size=3), after=st.text(" `'\"/&:,)", max_size=3))
def test_a_secret_is_cut_short_wherever_it_stands(secret: str, before: str, after: str) -> None:
    shown = without_secrets(f"{before}{secret}{after}")

    assert secret[-12:] not in shown
    assert shown.startswith(before) and shown.endswith(after)


@pytest.mark.parametrize(
    "said", ["", "The model `check_something_long_here` does not exist.", "fb_live_…", "pick_up", "week_of"]
)
def test_everything_else_is_as_it_was(said: str) -> None:
    assert without_secrets(said) == said


def test_what_an_error_says_by_itself_is_one_line() -> None:
    """Its docstring is folded; clients and logs are not to be."""
    assert "\n" in (ClassShed.__doc__ or "") and "\n" not in ClassShed().message


@pytest.mark.parametrize("key", KEYS, ids=KINDS)
def test_an_error_tells_which_key_and_not_what_it_is(key: str) -> None:
    error = UnknownModel(f"The model `{key}` does not exist.", param=f"metadata.{key}")

    assert (
        error.message
        == str(error)
        == f"The model `{key[: keys.ID_LENGTH + len(key.split('A')[0])]}_...` does not exist."
    )
    assert key[-10:] not in str(error.envelope())
    assert BadRequest("x").param is None


def test_a_log_line_has_none_of_it_not_even_in_a_trace() -> None:
    """Of structlog's own, of the standard library's, and of an exception's words."""
    said = f"""
import logging
from core.telemetry import logs
logs.set_up("p")
logs.get("a").info("x", client_request_id="{KEYS[0]}")
logging.getLogger("b").warning("said %s", "{KEYS[1]}")
try:
    raise ValueError("{KEYS[2]}")
except ValueError:
    logs.get("c").exception("failed")
"""
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True, timeout=60)

    lines = done.stderr.splitlines()
    assert len(lines) == 3 and all("A" * keys.ID_LENGTH + "_..." in line for line in lines)
    assert not any(key[-10:] in done.stderr for key in KEYS)
