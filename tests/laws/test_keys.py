"""Keys and their limits, over two gateways that share them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from core import postgres
from core.accounts import keys, tenants
from tests.platform import MODEL, PEPPER, Platform, command, until

HELLO = [{"role": "user", "content": "hello"}]


def new_key(platform: Platform, **limits: Any) -> tuple[str, str]:
    """A new key of the organisation: its text and its id. No gateway has seen it yet."""
    engine = postgres.connect(platform.database_url)
    with postgres.transaction(engine) as connection:
        project = tenants.projects(connection, platform.org_id)[0]
        plain, row = keys.create_key(
            connection, org_id=platform.org_id, project_id=project.id, name="k", pepper=PEPPER.encode(), **limits
        )
    engine.dispose()
    return plain, row.id


def ask(platform: Platform, key: str, gateway: int = 0, **body: Any) -> requests.Response:
    url = f"http://127.0.0.1:{platform.ports[gateway]}/v1/chat/completions"
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 3, **body}
    return requests.post(url, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=20)


def test_requests_per_minute_hold_across_gateways(platform: Platform) -> None:
    key, _ = new_key(platform, requests_per_minute=4)

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda n: ask(platform, key, n % 2), range(12)))

    refused = [answer for answer in answers if answer.status_code == 429]
    assert [answer.status_code for answer in answers].count(200) == 4 and len(refused) == 8
    for answer in refused:
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        assert 0 < int(answer.headers["retry-after"]) <= 61
    allowed = [answer for answer in answers if answer.status_code == 200]
    assert {answer.headers["x-ratelimit-limit-requests"] for answer in allowed} == {"4"}
    assert {answer.headers["x-ratelimit-remaining-requests"] for answer in allowed} == {"0", "1", "2", "3"}


def test_concurrent_requests_free_their_place_as_they_end(platform: Platform) -> None:
    key, _ = new_key(platform, concurrent_requests=1)

    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(ask, platform, key, max_tokens=600)
        until(lambda: [row for row in platform.rows().values() if row.state == "running"], "it to run")
        assert ask(platform, key, gateway=1).status_code == 429
        assert long.result().status_code == 200

    until(lambda: ask(platform, key, gateway=1).status_code == 200, "the place to be free", 3)


def test_a_place_is_freed_when_its_client_leaves(platform: Platform) -> None:
    key, _ = new_key(platform, concurrent_requests=1)

    with pytest.raises(requests.ReadTimeout):
        url = f"{platform.url}/v1/chat/completions"
        body = {"model": MODEL, "messages": HELLO, "max_tokens": 4000}
        requests.post(url, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=0.5)

    until(lambda: ask(platform, key).status_code == 200, "the place to be free", 5)


def test_a_revoked_key_stops_at_once(platform: Platform) -> None:
    key, key_id = new_key(platform)
    assert ask(platform, key).status_code == 200

    done = command(platform, "key", "revoke", key_id)

    assert done.returncode == 0, done.stderr
    for gateway in (0, 1):
        answer = ask(platform, key, gateway)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


def test_an_admin_key_reads_metrics_and_cannot_generate(platform: Platform) -> None:
    admin, _ = new_key(platform, kind="admin")

    metrics = requests.get(f"{platform.url}/metrics", headers={"Authorization": f"Bearer {admin}"}, timeout=5)
    others = requests.get(f"{platform.url}/metrics", headers={"Authorization": f"Bearer {platform.key}"}, timeout=5)

    assert metrics.status_code == 200 and "forebay_requests_admitted_total" in metrics.text
    assert others.status_code == 403
    assert ask(platform, admin).status_code == 403


def test_a_key_takes_effect_without_a_restart(platform: Platform) -> None:
    """A key that the gateways never saw is asked for in Postgres once, and served from Redis after that."""
    key, key_id = new_key(platform)
    assert platform.store.run(keys.read(key_id)) is None

    start = time.monotonic()
    assert ask(platform, key).status_code == 200
    assert time.monotonic() - start < 2
    assert platform.store.run(keys.read(key_id)) is not None
