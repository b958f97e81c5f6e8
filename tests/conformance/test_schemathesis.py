"""schemathesis asks the API whatever its own description allows, and what it does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.platform import Platform
from web.reference import OPERATIONS

ROOT = Path(__file__).parents[2]

#: Checks that are not made, and why.
EXCLUDED = {
    "positive_data_acceptance": "it takes each 400 for a fault, and a valid body may be refused for what no schema can "
    "say: tokens that the model does not have, a tool_choice that names none of the tools, a budget above max_tokens",
    "allow_header_conformance": "GET /v1/responses is a WebSocket, which OpenAPI has no words for, and one address can "
    "match two paths: /v1/responses/input_tokens is also a {response_id}, as at OpenAI",
    "object_level_authorization": "it needs two keys; tests/laws/test_keys.py and test_stored.py have them",
}
#: How an invalid body may be refused. Some of schemathesis' are too large before they are invalid.
REFUSED = [400, 401, 403, 404, 405, 410, 411, 413, 414, 415, 422, 431]
#: Random cases for each operation. What it derives from the document by rule, thousands, comes on top.
EXAMPLES = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "5"))
#: Groups of operations that are asked at the same time, by processes: its own threads break CPython 3.11's `ast`.
APART = ("Completions", "Responses")
#: Only in one group do answers lead from one operation to others.
LINKED = "Responses"
PHASES = ["examples", "coverage", "fuzzing"]
#: Of each process; half a minute is what they take.
TIMEOUT_S = 200 + 10 * EXAMPLES


@pytest.mark.timeout(TIMEOUT_S + 20)
def test_no_5xx_no_undocumented_answer_and_no_invalid_body_accepted(platform: Platform, tmp_path: Path) -> None:
    rest = [group for group in dict.fromkeys(one.group for one in OPERATIONS) if group not in APART]
    with ThreadPoolExecutor() as threads:
        reports = list(threads.map(partial(asked, platform, tmp_path), [[APART[0]], [APART[1]], rest]))
    print([report["test_cases"] for report in reports])
    assert sum(report["operations"]["tested"] for report in reports) == len(OPERATIONS)
    # What is asked with a body has been done, too, and not only refused.
    accepted = {name: rates for report in reports for name, rates in report["valid_rates"].items()}
    for one in OPERATIONS:
        if one.body:
            rates = accepted[f"{one.method} {one.path}"]
            assert sum(rate["accepted"] for rate in rates.values()) > 0, one.path


def asked(platform: Platform, folder: Path, groups: list[str]) -> dict[str, Any]:
    """What it found in some of the operations: nothing, or the test fails."""
    folder = folder / groups[0]
    folder.mkdir()
    config, report = folder / "schemathesis.toml", folder / "report.json"
    config.write_text(
        'hooks = "tests.conformance.asking"\n'
        f'[auth.openapi.bearer]\nbearer = "{platform.key}"\n'
        f"[checks.negative_data_rejection]\nexpected-statuses = {REFUSED}\n"
    )
    phases = [*PHASES, *(["stateful"] if LINKED in groups else [])]
    program = Path(sys.prefix) / "bin" / "st"
    done = subprocess.run(
        [
            *(str(program), "--config-file", str(config), "run", f"{platform.url}/openapi.json"),
            *("--phases", ",".join(phases), "--checks", "all", "--exclude-checks", ",".join(EXCLUDED)),
            *(word for group in groups for word in ("--include-tag", group)),
            *("--max-examples", str(EXAMPLES), "--seed", "4", "--no-shrink", "--continue-on-failure"),
            *("--generation-database", "none", "--no-color", "--warnings", "off"),
            *("--report", "json", "--report-json-path", str(report)),
        ],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
    told: dict[str, Any] = json.loads(report.read_text())
    assert (told["complete"], told["errors"], told["failures"]) == (True, [], [])
    assert [told["phases"][phase]["status"] for phase in phases] == ["success"] * len(phases)
    return told
