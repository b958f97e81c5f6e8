"""One organisation's flood is its own: another's few requests do not wait behind it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import requests

from core import postgres
from core.accounts import keys, tenants
from core.redis import tag
from tests.platform import MODEL, PEPPER, Platform, until

FLOOD = 160  #: two and a half times what both workers run at once
WAITING = 40
FEW = 4


def other_organisation(platform: Platform) -> tuple[str, str]:
    """Another organisation's key, and its id."""
    engine = postgres.connect(platform.database_url)
    with postgres.transaction(engine) as connection:
        organisation = tenants.create_organisation(connection, f"other {datetime.now(UTC)}")
        [project] = tenants.projects(connection, organisation.id)
        plain, _ = keys.create_key(
            connection, org_id=organisation.id, project_id=project.id, name="k", pepper=PEPPER.encode()
        )
    engine.dispose()
    return plain, organisation.id


def ask(platform: Platform, key: str, gateway: int) -> float:
    """When one request was answered."""
    url = f"http://127.0.0.1:{platform.ports[gateway]}/v1/chat/completions"
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 400}
    answer = requests.post(url, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60)
    assert answer.status_code == 200
    return time.monotonic()


def test_a_few_requests_pass_a_flood_of_another_organisation(platform: Platform) -> None:
    """They came last of all, and go next: the flood has been served for long, and they have not."""
    few_key, org_id = other_organisation(platform)

    with ThreadPoolExecutor(FLOOD + FEW) as pool:
        flood = [pool.submit(ask, platform, platform.key, n % 2) for n in range(FLOOD)]
        until(lambda: _waiting(platform) >= WAITING, "the flood to wait", 60)
        few = [pool.submit(ask, platform, few_key, n % 2) for n in range(FEW)]
        flood_s = sorted(one.result() for one in flood)
        few_s = max(one.result() for one in few)

    after = sum(at > few_s for at in flood_s)
    assert after >= WAITING // 2, f"only {after} of the flood came after the last of the few"
    until(lambda: platform.store.client.zcard(tag(f"org:{org_id}") + "open") == 0, "its holds to be settled")


def _waiting(platform: Platform) -> int:
    return sum(row.state == "waiting" for row in platform.rows().values())
