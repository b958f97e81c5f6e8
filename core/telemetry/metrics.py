"""Every metric name, with its unit and meaning. Names are public: `forebay_<noun>_<what>_<unit>`."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_WAITS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

requests_admitted = Counter(
    "forebay_requests_admitted_total", "Requests accepted onto the queue", ["model", "transport"]
)
requests_refused = Counter("forebay_requests_refused_total", "Requests refused before the queue", ["code"])
requests_ended = Counter("forebay_requests_ended_total", "Requests that reached their ending", ["model", "outcome"])
request_ttft_seconds = Histogram(
    "forebay_request_ttft_seconds", "From acceptance to the first token at the gateway", ["model"], buckets=_WAITS_S
)
stream_tokens = Counter("forebay_stream_tokens_total", "Tokens relayed to clients", ["model"])
stream_open = Gauge("forebay_stream_open_requests", "Requests whose stream is open at this gateway")
stream_fenced = Counter("forebay_stream_fenced_total", "Deltas dropped: of an older attempt, or delivered before")
stream_gaps = Counter("forebay_stream_gaps_total", "Gaps in open streams: a part of the output did not come")
stream_filled = Counter("forebay_stream_filled_total", "Gaps filled from saved output and logs, and streams attached")
tasks_ended = Counter(
    "forebay_tasks_ended_total", "Tasks that a worker ended, or was fenced from ending", ["model", "outcome"]
)
requests_preempted = Counter(
    "forebay_requests_preempted_total", "Requests handed back for something more urgent", ["model"]
)
limits_debt_tokens = Counter(
    "forebay_limits_debt_tokens_total", "Tokens of streams beyond their limits, which new requests wait for", ["model"]
)
responses_kept = Counter("forebay_responses_kept_total", "Responses stored before their clients had the end")
responses_unkept = Counter(
    "forebay_responses_unkept_total", "Responses that should have been stored, while the database was away or slow"
)
background_fed = Counter("forebay_background_fed_total", "Background work put on the queue again from the backlog")
loops_failed = Counter("forebay_loops_failed_total", "Background loops that failed and were started again", ["loop"])
usage_ingested = Counter("forebay_usage_ingested_total", "Usage entries written to Postgres")
usage_waiting = Gauge("forebay_usage_waiting_entries", "Usage entries not yet in Postgres", ["model"])
money_drift_units = Gauge(
    "forebay_money_drift_units",
    "Largest difference, in 1e-10 of a currency, between what a lease of money says and the ledger, found twice",
)
queue_waiting = Gauge("forebay_queue_waiting_requests", "Requests that wait", ["model", "cls"])
queue_oldest_seconds = Gauge("forebay_queue_oldest_seconds", "How long the longest waiter has waited", ["model"])
fleet_workers = Gauge("forebay_fleet_workers", "Workers", ["model", "state"])
