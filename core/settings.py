"""The environment, read once per process, strictly: all faults at once, and an unknown FOREBAY_ name is one.

Entry points call `read(os.environ)` and hand the frozen result on; nothing else looks at the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_network
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

#: What GPU workers and their agents must not be told: the way to the money, and the secrets of keys and caches.
WITHHELD = ("DATABASE_URL", "FOREBAY_PEPPER", "FOREBAY_SALT")


class BadSettings(Exception):
    """The environment is not valid."""


class Settings(BaseModel):
    """What a process is told from outside. Field names are the variable names in lower case, without FOREBAY_."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    redis_url: str = ""  #: empty: only valid for `forebay up`, which starts its own; a cluster's: see core/redis.py
    limits_url: str = ""  #: a store of its own for limits (core/limits); empty: the one of REDIS_URL
    database_url: str = ""  #: the same; GPU workers never have it
    data: Path = Path(".forebay")  #: models, secrets, and the embedded stores
    port: int = Field(8000, ge=0, le=65535)  #: 0: a free one
    bind: str = "127.0.0.1"
    engine: Literal["vllm", "timed", "scripted"] = "vllm"
    catalog: Path | None = None  #: a TOML file; none: the one that ships with Forebay
    models: str = ""  #: comma-separated: serve only these of the catalogue; empty: all
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    web_processes: int = Field(1, ge=1, le=64)
    lease_ms: int = Field(0, ge=0, le=120_000)  #: 0: 3 s on a GPU; 10 s on the CPU, whose busy cores starve the loop
    drain_s: float = Field(30.0, ge=0, le=3600)  #: how long running requests may go on after SIGTERM
    buffer_s: float = Field(60.0, ge=1, le=600)  #: how long a worker keeps tokens for a store that is away
    lost_s: float = Field(30.0, ge=1, le=3600)  #: how long after a gateway's death its streams may be come back for
    keepalive_s: float = Field(15.0, ge=0.1, le=600)  #: how often a silent stream says so, for proxies' sake
    upload_s: float = Field(60.0, ge=0.1, le=3600)  #: how long the body of a request may take to arrive
    stalled_s: float = Field(30.0, ge=0.1, le=3600)  #: how long a client may take nothing of what is sent to it
    chat_keepalive: Literal["comment", "chunk", "off"] = "comment"  #: of a silent chat stream
    chat_ids: bool = True  #: an `id:` on each chat event, to come back with; off for clients that know only `data:`
    key_sockets: int = Field(100, ge=1, le=100_000)  #: WebSockets that one key may have open, over all gateways
    origins: str = ""  #: comma-separated, as browsers say them (https://app.example), or *: pages that may open sockets
    proxies: str = ""  #: comma-separated networks (10.0.0.0/8) of proxies before us, whose X-Forwarded-For counts
    host_id: str = ""  #: this machine's name in the fleet; empty: its hostname
    tick_ms: int = Field(1000, ge=50, le=60_000)  #: how often the scaler looks
    workers: str = ""  #: "model=count,…": what a host runs while no scaler assigns anything; empty: nothing
    pepper: str = ""  #: what API keys are hashed with, or "2:NEW,1:OLD"; empty: `secrets/pepper` in the data folder
    salt: str = ""  #: secret that cache salts are derived from; empty: `secrets/salt` in the data folder
    tally: Path | None = None  #: where the scripted engine writes down whose tokens it makes, for who checks tokens
    traces: Path = Path("../shared/traces")  #: public traces of requests, which some benches replay
    supervised: bool = False  #: set by our supervisor: end when it is gone
    engine_of: str = ""  #: set by the host's agent: whose worker, and whose engine's processes, these are

    @field_validator("proxies")
    @classmethod
    def _are_networks(cls, said: str) -> str:
        for one in filter(None, map(str.strip, said.split(","))):
            ip_network(one)
        return said

    def lease(self, *, on_cpu: bool) -> tuple[int, int]:
        """A worker's lease and its beat, ms. At least two beats may be lost before the lease runs out.

        A model on the CPU starves the loop that beats beside it, so its lease is longer.
        """
        lease_ms = self.lease_ms or (10_000 if on_cpu and self.engine == "vllm" else 3_000)
        return lease_ms, min(lease_ms // 3, 2_000)

    @property
    def secrets(self) -> Path:
        return self.data / "secrets"


_PLAIN = {"redis_url": "REDIS_URL", "database_url": "DATABASE_URL"}


def variable(field: str) -> str:
    """The environment variable of a field."""
    return _PLAIN.get(field, "FOREBAY_" + field.upper())


def read(environ: Mapping[str, str]) -> Settings:
    """Read the environment.

    Raises:
      BadSettings: with one line for every fault.
    """
    fields = {variable(name): name for name in Settings.model_fields}
    faults = [f"{name}: no such setting" for name in environ if name.startswith("FOREBAY_") and name not in fields]
    found = {fields[name]: value for name, value in environ.items() if name in fields and value != ""}
    try:
        settings = Settings.model_validate(found)
    except ValidationError as e:
        faults += [f"{variable(str(fault['loc'][0]))}: {fault['msg']}" for fault in e.errors()]
        raise BadSettings("\n".join(faults)) from None
    if faults:
        raise BadSettings("\n".join(faults))
    return settings
