"""Who holds which prefix: vLLM's own block hashes, and an index of the workers that have computed them.

| key                    | type | ttl* | writer               | reader   | holds                                 |
|------------------------|------|------|----------------------|----------|---------------------------------------|
| f1:{model}:holders     | HASH | yes  | hold: the worker, as | gateways | hash -> `worker|until ms` of at most  |
|                        |      |      | it begins a request  |          | HOLDERS workers, newest first, by `;` |
| f1:{model}:holders_due | ZSET | yes  | hold                 | hold     | hash -> when its last holder expires  |

* HOLD_MAX_MS from the last `hold` on: by then every entry has expired.

vLLM hashes each whole block of a prompt together with all before it, so equal hashes mean equal prefixes. The salt of
the organisation is in the first block, and so in all that follow: no organisation finds another's prefix. A gateway
computes the same hashes, keeps those at a few fixed depths (`checkpoints`), and asks who holds them.

Promise   an entry is a hint: that a worker began such a request at most `hold_ms` ago. It may have evicted the blocks
          since; then it computes them again, and nothing else happens. At most HOLDERS_MAX hashes are kept, and at most
          one call's worth above it; those that expire first go first.
Dies      worker: its entries expire; the router leaves out who is not alive, and the queue gives what prefers a dead
          worker to anybody. Gateway: nothing is its own. Store lost: prompts are computed anew for a while.
          Cluster: one tag, {model}.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cbor2

from core.redis import Call, scripts, tag

_SCRIPTS = scripts(Path(__file__).with_name("lua"), shared=("holding",), verbs=("hold", "holders"))

#: How long a worker is taken to hold what it computed, ms: as long as its cache takes to be filled anew
#: (workers/headroom.py), within these bounds. Who waits for what is evicted waits for nothing (`forebay bench prefix`:
#: where caches turn over in half a minute, 60 s finds 0.97 of what there is and 300 s 0.93).
HOLD_MS, HOLD_MAX_MS = 60_000, 900_000
#: Hashes in one model's index.
HOLDERS_MAX = 200_000
#: Workers that one hash names.
HOLDERS = 4
#: Deepest checkpoints of one prompt; more than any context has.
DEPTHS_MAX = 40
#: Bytes of a hash that the index keeps: a false match costs a wrong hint, and at this length it does not happen.
MARK_BYTES = 8

#: vLLM's hash before the first block, for `prefix_caching_hash_algo="sha256_cbor"` and no PYTHONHASHSEED.
_NONE_HASH = hashlib.sha256(cbor2.dumps("vllm-none-hash", canonical=True)).digest()


def chain(tokens: Sequence[int], block_tokens: int, salt: str) -> list[bytes]:
    """The hashes of the whole blocks of a prompt, as vLLM computes them (v1/core/kv_cache_utils.py).

    vLLM computes at least the last token itself, so of a prompt that ends with a block that one is never a hit.
    """
    sha256, dumps = hashlib.sha256, cbor2.dumps
    parent, extra = _NONE_HASH, (("cache_salt", salt),) if salt else None
    hashes = []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = (parent, tuple(tokens[start : start + block_tokens]), extra)
        parent, extra = sha256(dumps(block, canonical=True)).digest(), None
        hashes.append(parent)
    return hashes


def depths(blocks: int) -> list[int]:
    """The block counts at which a prompt of so many blocks is looked up: 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, ….

    The same for every prompt, or two prompts would not meet: of what they share, at least two thirds is seen.
    """
    return list(_depths(blocks))


def _depths(blocks: int) -> Iterator[int]:
    depth = 1
    while depth <= blocks:
        yield depth
        if depth >= 8 and depth & (depth - 1) == 0 and depth + depth // 2 <= blocks:
            yield depth + depth // 2
        depth *= 2


def checkpoints(hashes: Sequence[bytes]) -> tuple[bytes, ...]:
    """What the index knows a prompt by: the beginnings of its hashes at `depths`, deepest last."""
    return tuple(hashes[depth - 1][:MARK_BYTES] for depth in depths(len(hashes)))


def hold(
    model: str, worker: str, marks: Sequence[bytes], *, hold_ms: int = HOLD_MS, most: int = HOLDERS_MAX
) -> Call[int]:
    """A worker begins a request with these checkpoints. Returns how many hashes the index has now."""
    index_ms = max(hold_ms, HOLD_MAX_MS)
    return _call("hold", model, worker, hold_ms, most, HOLDERS, index_ms, *marks[:DEPTHS_MAX], reply=int)


def holders(model: str, marks: Sequence[bytes]) -> Call[list[list[str]]]:
    """For each checkpoint the workers that hold it, newest first."""
    return _call("holders", model, *marks[:DEPTHS_MAX], reply=lambda raw: [_names(names) for names in raw])


def _call(verb: str, model: str, *args: Any, reply: Any) -> Call[Any]:
    keys = (tag(model) + "holders", tag(model) + "holders_due")
    return Call(script=_SCRIPTS[verb], keys=keys, args=args, reply=reply)


def _names(raw: bytes | str) -> list[str]:
    text = raw.decode() if isinstance(raw, bytes) else raw
    return text.split(";") if text else []
