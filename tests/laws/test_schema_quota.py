"""Different JSON schemas of an organisation, over two gateways: the engine's cache of grammars is everybody's."""

from __future__ import annotations

from typing import Any

import requests

from core.limits import schemas
from core.redis import tag
from tests.platform import MODEL, Platform


def ask(platform: Platform, title: str, gateway: int = 0, **more: Any) -> requests.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    form = {"structured_outputs": {"json": {"type": "object", "title": title}}} if title else {}
    url = f"http://127.0.0.1:{platform.ports[gateway]}/v1/chat/completions"
    headers = {"Authorization": f"Bearer {platform.key}"}
    return requests.post(url, json={**body, **form, **more}, headers=headers, timeout=20)


def test_one_organisation_cannot_fill_the_cache_of_all(platform: Platform) -> None:
    """Whatever gateways it asks, whether its requests ran or not; and what needs no new schema is served as before."""
    key = f"{tag('org:' + platform.org_id)}schemas"
    platform.store.client.delete(key)
    assert ask(platform, "first").status_code == 200
    for n in range(schemas.PER_MINUTE - 1):
        assert platform.store.run(schemas.note(platform.org_id, f"{n:032x}")) == 0
    before = set(platform.rows())

    refused = [ask(platform, "another", gateway) for gateway in (0, 1)]

    assert set(platform.rows()) == before, "nothing was queued"
    for answer in refused:
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (429, "rate_limit_exceeded")
        assert f"{schemas.PER_MINUTE} different JSON schemas" in error["message"]
        assert 0 < int(answer.headers["retry-after"]) <= 60 and answer.headers["x-should-retry"] == "true"
    assert [ask(platform, "first", gateway).status_code for gateway in (0, 1)] == [200, 200]
    assert ask(platform, "").status_code == 200
    assert ask(platform, "", response_format={"type": "json_object"}).status_code == 200
    platform.store.client.delete(key)
