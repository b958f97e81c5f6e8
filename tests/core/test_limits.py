"""The limiter's laws, on a real Valkey with its clock in the test's hand."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.limits.balances import UNITS, UNITS_MAX, Figures, account, grant, open_lease, sum_up, units_up
from core.limits.counters import (
    REPORT_MAX,
    Leash,
    Need,
    Refused,
    Report,
    Reserved,
    Terms,
    Unleased,
    held_for,
    late,
    open_before,
    progress,
    reserve,
    settle,
    used,
)
from core.limits.scopes import Limit
from core.redis import Store
from core.values import Usage
from tests.conftest import Clock

STORES = ("single", "cluster")

KEY = "key:k"
#: A unit of money for each token of input, two for one of output.
TERMS = Terms(prices=(10**6, 10**6, 2 * 10**6))


def ask(
    store: Store, name: str, need: tuple[int, int] = (0, 0), *, least: int | None = None, **limits: Any
) -> Reserved | Refused | Unleased:
    """Ask for tokens (input, output) under the limits of one key."""
    return ask_all(store, name, [Limit(scope=KEY, **limits)], need, least=least)


def ask_all(
    store: Store, name: str, limits: list[Limit], need: tuple[int, int], *, least: int | None = None
) -> Reserved | Refused | Unleased:
    wanted = Need(input_tokens=need[0], output_tokens=need[1], least_output_tokens=need[1] if least is None else least)
    return store.run(reserve("o", name, "k", "m", limits, wanted, TERMS))


def end(store: Store, name: str, used_in: int = 0, used_out: int = 0, **how: Any) -> bool:
    usage = Usage(input_tokens=used_in, output_tokens=used_out)
    return store.run(settle("o", name, [KEY], usage, **{"billed": True, **how}))


def report(store: Store, name: str, used_in: int, used_out: int, hold: int = 0, money: int = 0) -> Leash:
    usage = Usage(input_tokens=used_in, output_tokens=used_out)
    one = Report(request_id=name, key_id="k", scopes=(KEY,), usage=usage, hold_tokens=hold, money_tokens=money)
    return store.run(progress("o", [one]))[0]


def tokens_of(store: Store) -> int:
    [one] = store.run(used("o", [Limit(scope=KEY)]))
    return one.input_tokens + one.output_tokens


def test_requests_per_minute_hold_in_any_window(store: Store, clock: Clock) -> None:
    clock.set(60_250)
    got = [ask(store, f"r{n}", requests_per_minute=3) for n in range(4)]

    assert [type(one).__name__ for one in got] == ["Reserved"] * 3 + ["Refused"]
    refused = got[3]
    assert isinstance(refused, Refused) and refused.reason == "requests" and refused.retry_after_ms == 60_250
    clock.advance(refused.retry_after_ms - 1)
    assert isinstance(ask(store, "early", requests_per_minute=3), Refused)
    clock.advance(1)
    assert isinstance(ask(store, "in time", requests_per_minute=3), Reserved)


def test_concurrency_frees_with_the_ending(store: Store) -> None:
    assert isinstance(ask(store, "a", concurrent_requests=1), Reserved)
    refused = ask(store, "b", concurrent_requests=1)
    assert isinstance(refused, Refused) and (refused.reason, refused.retry_after_ms) == ("concurrency", None)

    assert end(store, "a", 5, 5) is True
    assert isinstance(ask(store, "b", concurrent_requests=1), Reserved)


def test_a_hold_is_settled_once(store: Store) -> None:
    ask(store, "a")

    assert [end(store, "a", 10) for _ in range(3)] == [True, False, False]
    assert end(store, "never reserved", 10) is False
    assert tokens_of(store) == 10


def test_a_repeated_reserve_opens_one_hold(store: Store) -> None:
    """The gateway repeats a call whose reply was lost."""
    first, again = (ask(store, "a", (3, 4), requests_per_minute=5, concurrent_requests=1) for _ in range(2))

    assert isinstance(first, Reserved) and isinstance(again, Reserved)
    assert store.run(open_before("o", 10**15)) == ["a"]
    assert again.left[0].requests == first.left[0].requests == 4


def test_tokens_used_and_held_count_together(store: Store) -> None:
    assert isinstance(ask(store, "a", (30, 30), tokens_per_minute=100), Reserved)
    refused = ask(store, "b", (30, 30), tokens_per_minute=100)
    assert isinstance(refused, Refused) and (refused.reason, refused.retry_after_ms) == ("tokens", None)

    report(store, "a", 30, 10, hold=0)
    assert isinstance(ask(store, "b", (30, 30), tokens_per_minute=100), Reserved)


def test_a_late_settle_mints_nothing(store: Store, clock: Clock) -> None:
    """Peers give back what time has already restored: 18k get into a window of 10k."""
    assert isinstance(ask(store, "a", (0, 9000), tokens_per_minute=10_000), Reserved)
    clock.advance(61_000)
    assert isinstance(ask(store, "b", (0, 9000), tokens_per_minute=10_000), Refused)

    end(store, "a", 0, 100)
    assert isinstance(ask(store, "b", (0, 9000), tokens_per_minute=10_000), Reserved)
    assert isinstance(ask(store, "c", (0, 9000), tokens_per_minute=10_000), Refused)


def slowly(store: Store, name: str, tokens: int, pace: float, most: int) -> Reserved | Refused | Unleased:
    """Ask for output that comes at a pace, under tokens a minute."""
    need = Need(input_tokens=0, output_tokens=tokens, least_output_tokens=0, pace=pace)
    return store.run(reserve("o", name, "k", "m", [Limit(scope=KEY, tokens_per_minute=most)], need))


def test_long_slow_answers_do_not_freeze_a_key(store: Store) -> None:
    """Twenty of 4,000 tokens at two a second come to 2,500 in a window: three thousand a minute are enough for them."""
    got = [slowly(store, f"r{n}", 4_000, 2.0, 3_000) for n in range(26)]
    assert [type(one).__name__ for one in got] == ["Reserved"] * 24 + ["Refused"] * 2


def test_what_leaves_the_window_makes_room_for_what_comes_meanwhile(store: Store, clock: Clock) -> None:
    """A thousand a minute, 900 used: an answer of 600 at ten a second fits where a burst of 600 does not."""
    clock.set(600_000)
    ask(store, "before", (900, 0), tokens_per_minute=1_000)
    end(store, "before", 900)
    clock.advance(55_000)

    assert isinstance(ask(store, "burst", (0, 600), tokens_per_minute=1_000), Refused)
    assert isinstance(slowly(store, "stream", 600, 10.0, 1_000), Reserved)
    assert isinstance(ask(store, "another", (90, 0), tokens_per_minute=1_000), Refused), "80 come before it leaves"
    assert isinstance(ask(store, "small", (20, 0), tokens_per_minute=1_000), Reserved)


def test_a_stream_that_keeps_its_pace_makes_no_debt_in_a_full_window(store: Store, clock: Clock) -> None:
    """Ten a second take 625 of a minute with what is firm; others take all the rest, again and again."""
    clock.set(600_000)
    assert isinstance(slowly(store, "stream", 10**5, 10.0, 1_000), Reserved)
    for second in range(1, 181):
        clock.advance(1_000)
        usage = Usage(output_tokens=10 * second)
        one = Report(
            request_id="stream", key_id="k", scopes=(KEY,), usage=usage, hold_tokens=10**5, money_tokens=0, pace=10.0
        )
        assert store.run(progress("o", [one])) == [Leash(open=True, allowance_tokens=None, stopped="", debt_tokens=0)]
        for size in (100, 10, 1):
            if isinstance(ask(store, f"{second}-{size}", (size, 0), tokens_per_minute=1_000), Reserved):
                end(store, f"{second}-{size}", size)
    assert tokens_of(store) >= 960


def test_what_can_never_fit_is_told_so(store: Store, valkey: redis.Redis) -> None:
    refused = ask(store, "a", (50, 51), tokens_per_minute=100)

    assert isinstance(refused, Refused) and (refused.reason, refused.retry_after_ms) == ("too_large", None)
    assert list(valkey.scan_iter("f1:{org:o}:*")) == []


def test_a_hold_that_nobody_asked_for_shrinks_to_the_limit(store: Store) -> None:
    assert isinstance(ask(store, "a", (50, 500), least=1, tokens_per_minute=100), Reserved)
    assert isinstance(ask(store, "b", (100, 500), least=1, tokens_per_minute=100), Refused)


def test_input_and_output_may_be_limited_apart(store: Store) -> None:
    """A long prompt eats nothing of the output's limit."""
    limits = {"input_tokens_per_minute": 100, "output_tokens_per_minute": 20}
    assert isinstance(ask(store, "a", (90, 5), **limits), Reserved)
    by_input, by_output = ask(store, "b", (20, 5), **limits), ask(store, "c", (5, 16), **limits)

    assert isinstance(by_input, Refused) and by_input.reason == "input_tokens"
    assert isinstance(by_output, Refused) and by_output.reason == "output_tokens"


def test_when_to_come_back_is_told_to_the_millisecond(store: Store, clock: Clock) -> None:
    clock.set(100_200)
    ask(store, "a", (40, 0), tokens_per_minute=100)
    end(store, "a", 40)
    clock.advance(7_000)
    ask(store, "b", (40, 0), tokens_per_minute=100)
    end(store, "b", 40)

    refused = ask(store, "c", (50, 0), tokens_per_minute=100)
    assert isinstance(refused, Refused) and refused.retry_after_ms is not None
    clock.advance(refused.retry_after_ms - 2)
    assert isinstance(ask(store, "c", (50, 0), tokens_per_minute=100), Refused)
    clock.advance(2)
    assert isinstance(ask(store, "c", (50, 0), tokens_per_minute=100), Reserved)


def test_progress_charges_each_token_once(store: Store) -> None:
    ask(store, "a", (10, 20))
    for so_far in (5, 5, 12):
        assert report(store, "a", 10, so_far).open
    assert tokens_of(store) == 22
    end(store, "a", 10, 15)
    assert tokens_of(store) == 25


def test_a_rate_limit_never_cuts_a_stream_but_counts_its_debt(store: Store) -> None:
    """What it makes beyond its hold, when there is no room, is debt; admissions wait until it has left."""
    ask(store, "a", (10, 20), tokens_per_minute=40)
    leash = report(store, "a", 10, 20, hold=30)
    assert leash == Leash(open=True, allowance_tokens=None, stopped="", debt_tokens=0)

    leash = report(store, "a", 10, 45, hold=30)
    assert leash.open and leash.debt_tokens == 15
    assert isinstance(ask(store, "b", (1, 0), tokens_per_minute=40), Refused)


def test_cached_input_counts_at_its_weight(store: Store) -> None:
    for weight, counted in ((0, 20), (250, 45), (1000, 120)):
        terms = Terms(cached_weight=weight)
        need = Need(input_tokens=120, output_tokens=0, least_output_tokens=0)
        store.run(reserve("o", f"w{weight}", "k", "m", [Limit(scope=KEY)], need, terms))
        before = tokens_of(store)
        store.run(settle("o", f"w{weight}", [KEY], Usage(input_tokens=120, cached_tokens=100), billed=True))
        assert tokens_of(store) - before == counted


def test_every_scope_or_none(store: Store, valkey: redis.Redis) -> None:
    limits = [Limit(scope=KEY, requests_per_minute=9), Limit(scope="org", requests_per_minute=0)]

    refused = ask_all(store, "r", limits, (1, 1))

    assert isinstance(refused, Refused) and refused.limit == limits[1]
    assert list(valkey.scan_iter("f1:{org:o}:*")) == []


@pytest.mark.parametrize("rpm", [None, 0])
def test_no_limit_is_not_a_limit_of_zero(store: Store, rpm: int | None) -> None:
    assert isinstance(ask(store, "a", requests_per_minute=rpm), Reserved if rpm is None else Refused)


def test_who_is_stopped_is_not_admitted_and_is_told_on_the_way(store: Store, valkey: redis.Redis) -> None:
    ask(store, "a", (1, 9))
    valkey.hset("f1:{org:o}:stopped", KEY, "revoked")

    refused = ask(store, "b", (1, 9))
    assert isinstance(refused, Refused) and refused.reason == "revoked"
    assert report(store, "a", 1, 2).stopped == "revoked"


def test_what_was_refused_after_all_counts_as_no_request(store: Store, clock: Clock) -> None:
    ask(store, "a", (5, 5), requests_per_minute=1)
    clock.advance(2_000)
    assert end(store, "a", forgo=True)
    assert isinstance(ask(store, "b", requests_per_minute=1), Reserved)
    assert isinstance(ask(store, "c", requests_per_minute=1), Refused)


def test_a_store_that_lost_its_data_takes_up_what_runs(store: Store, valkey: redis.Redis) -> None:
    ask(store, "a", (10, 20))
    report(store, "a", 10, 5, hold=20)
    valkey.flushall()

    assert report(store, "a", 10, 8, hold=20).open
    [found] = store.run(used("o", [Limit(scope=KEY)]))
    assert (found.held_tokens, found.open) == (20, 1), "it holds again what it wants"
    assert report(store, "a", 10, 9, hold=20).open
    assert store.run(open_before("o", 10**15)) == ["a"]
    held = store.run(held_for("o", "a"))
    assert held is not None and held.scopes == (KEY,)
    assert end(store, "a", 10, 9) and tokens_of(store) == 1


def test_a_hold_of_the_release_before_is_settled_and_counts_for_nothing(store: Store, valkey: redis.Redis) -> None:
    """It has no plan, and that release counted in other keys."""
    valkey.hset("f1:{org:o}:hold:old", mapping={"state": "open", "model": "m", "scopes": KEY, "charged": 3})
    valkey.zadd("f1:{org:o}:open", {"old": 1})

    assert report(store, "old", 5, 5, hold=9).open
    assert [end(store, "old", 5, 9) for _ in range(2)] == [True, False]
    assert tokens_of(store) == 0 and store.run(open_before("o", 10**15)) == []


def test_a_clock_that_goes_back_mints_nothing_and_freezes_nothing(store: Store, clock: Clock) -> None:
    """What was used later than now counts as used now: for a minute from then on, though all that asks is refused."""
    clock.set(100_000_000)
    ask(store, "a", (90, 0), tokens_per_minute=100)
    end(store, "a", 90)
    clock.set(900_000)
    refused = ask(store, "b", (20, 0), tokens_per_minute=100)
    assert isinstance(refused, Refused) and refused.retry_after_ms == 60_500
    clock.advance(1_000)
    ask(store, "c", (10, 0), tokens_per_minute=100)
    end(store, "c", 10)
    clock.set(960_499)
    assert isinstance(ask(store, "d", (1, 0), tokens_per_minute=100), Refused)
    clock.set(960_500)
    assert isinstance(ask(store, "d", (91, 0), tokens_per_minute=100), Refused)
    assert isinstance(ask(store, "d", (90, 0), tokens_per_minute=100), Reserved)


def test_what_is_refused_after_all_when_the_clock_went_back_breaks_nothing(store: Store, clock: Clock) -> None:
    """One scope is older than the other, so the request lies in a bin that one of them has not."""
    clock.set(1_000_000)
    ask_all(store, "a", [Limit(scope="org")], (1, 1))
    store.run(settle("o", "a", ["org"], Usage(), billed=False))
    clock.set(990_000)
    ask_all(store, "b", [Limit(scope=KEY), Limit(scope="org")], (1, 1))
    clock.set(980_000)
    assert store.run(settle("o", "b", [KEY, "org"], Usage(), billed=False, forgo=True))
    clock.set(995_000)
    assert isinstance(ask_all(store, "c", [Limit(scope=KEY), Limit(scope="org")], (1, 1)), Reserved)
    assert [one.requests for one in store.run(used("o", [Limit(scope=KEY), Limit(scope="org")]))] == [2, 3]


def test_a_prompt_that_was_cached_whole_is_held_no_longer(store: Store) -> None:
    terms = Terms(cached_weight=0)
    need = Need(input_tokens=50, output_tokens=10, least_output_tokens=10)
    store.run(reserve("o", "a", "k", "m", [Limit(scope=KEY)], need, terms))
    usage = Usage(input_tokens=50, cached_tokens=50, output_tokens=1)
    store.run(
        progress("o", [Report(request_id="a", key_id="k", scopes=(KEY,), usage=usage, hold_tokens=9, money_tokens=0)])
    )
    [found] = store.run(used("o", [Limit(scope=KEY)]))
    assert (found.input_tokens, found.output_tokens, found.held_tokens) == (0, 1, 9)


def test_two_requests_of_a_scope_in_one_report_both_count(store: Store) -> None:
    for name in "ab":
        ask(store, name, (10, 20), tokens_per_minute=100)
    both = [
        Report(
            request_id=name,
            key_id="k",
            scopes=(KEY,),
            usage=Usage(input_tokens=10, output_tokens=output),
            hold_tokens=40,
            money_tokens=0,
        )
        for name, output in (("a", 5), ("b", 7))
    ]
    assert [leash.open for leash in store.run(progress("o", both))] == [True, True]
    [found] = store.run(used("o", [Limit(scope=KEY)]))
    assert (found.input_tokens, found.output_tokens, found.held_tokens) == (20, 12, 40 + 28)


def test_a_counter_outlives_what_is_open_in_it_and_not_much_more(store: Store, valkey: redis.Redis) -> None:
    name = "f1:{org:o}:window:key:k"
    ask(store, "a")
    assert valkey.ttl(name) == -1
    end(store, "a", 5)
    assert 100 < valkey.ttl(name) <= 120
    ask(store, "b")
    assert valkey.ttl(name) == -1
    end(store, "b")
    report(store, "never reserved", 5, 5)
    assert valkey.ttl(name) == -1


def test_a_hundred_requests_of_eight_scopes_are_one_report(store: Store) -> None:
    limits = [Limit(scope=f"model:{n}", tokens_per_minute=10_000) for n in range(8)]
    names, scopes = [f"r{n}" for n in range(REPORT_MAX)], tuple(limit.scope for limit in limits)
    for name in names:
        assert isinstance(ask_all(store, name, limits, (10, 20)), Reserved)
    usage = Usage(input_tokens=10, output_tokens=5)
    reports = [
        Report(request_id=name, key_id="k", scopes=scopes, usage=usage, hold_tokens=15, money_tokens=0)
        for name in names
    ]
    assert {leash.open for leash in store.run(progress("o", reports))} == {True}
    for found in store.run(used("o", limits)):
        assert (found.input_tokens, found.output_tokens, found.held_tokens, found.open) == (1000, 500, 1500, 100)


def test_debt_of_the_end_is_stated_too(store: Store, valkey: redis.Redis) -> None:
    ask(store, "a", (10, 20), tokens_per_minute=40)
    end(store, "a", 10, 45)
    assert valkey.hget("f1:{org:o}:hold:a", "debt") == b"15"


def test_a_scope_of_which_nothing_is_used_is_free_now(store: Store, clock: Clock) -> None:
    """And one whose last use was a while ago is free sooner than a minute from now, whatever was asked meanwhile."""
    limits = [Limit(scope=KEY, requests_per_minute=9, tokens_per_minute=9), Limit(scope="org", requests_per_minute=0)]
    refused = ask_all(store, "a", limits, (1, 1))
    assert isinstance(refused, Refused) and [left.reset_ms for left in refused.left] == [0, 0]

    clock.set(1_000_000)
    ask(store, "b", (1, 1), requests_per_minute=9)
    clock.set(1_010_000)
    end(store, "b")
    [found] = store.run(used("o", [limits[0]]))
    assert found.left.reset_ms == 50_500


# --- money


def lease(store: Store, **figures: int) -> None:
    assert store.run(open_lease("o", KEY, Figures(lease=figures.pop("lease", 1), **figures)))


def day_limit(units: int) -> dict[str, Decimal]:
    return {"money_per_day": Decimal(units) / 10**10}


def test_money_that_is_not_known_is_asked_for_first(store: Store) -> None:
    assert ask(store, "a", (1, 1), **day_limit(100)) == Unleased(scope=KEY)
    lease(store)
    assert isinstance(ask(store, "a", (1, 1), **day_limit(100)), Reserved)


def test_a_budget_covers_a_stream_to_the_token(store: Store) -> None:
    """100 units: 40 tokens of input, and 30 of output at two each."""
    lease(store)
    reserved = ask(store, "a", (40, 500), **day_limit(100))
    assert isinstance(reserved, Reserved) and reserved.allowance_tokens == 30

    assert report(store, "a", 40, 30, money=100).allowance_tokens == 30
    assert end(store, "a", 40, 30)
    found = store.run(account("o", KEY))
    assert found is not None and (found.spent, found.held, found.day_spent) == (100, 0, 100)
    refused = ask(store, "b", (1, 1), **day_limit(100))
    assert isinstance(refused, Refused) and refused.reason == "day"


def test_money_is_held_as_far_as_it_goes_and_given_back(store: Store) -> None:
    lease(store)
    first, second = (ask(store, name, (10, 30), **day_limit(100)) for name in "ab")
    assert isinstance(first, Reserved) and first.allowance_tokens == 30
    assert isinstance(second, Reserved) and second.allowance_tokens == 10

    end(store, "a", 10, 5)
    assert report(store, "b", 10, 10, money=50).allowance_tokens == 35
    end(store, "b", 10, 35)
    found = store.run(account("o", KEY))
    assert found is not None and (found.spent, found.held) == (100, 0)


def test_what_is_not_paid_for_is_given_back(store: Store) -> None:
    lease(store)
    ask(store, "a", (10, 30), **day_limit(100))
    report(store, "a", 10, 20)
    end(store, "a", 10, 20, billed=False)

    found = store.run(account("o", KEY))
    assert found is not None and (found.spent, found.day_spent, found.held) == (0, 0, 0)
    assert tokens_of(store) == 30, "but it was processed"


def test_a_new_day_has_a_new_budget_and_gets_none_of_yesterdays_back(store: Store, clock: Clock) -> None:
    clock.set(3 * 86_400_000 - 1_000)
    lease(store)
    ask(store, "a", (10, 30), **day_limit(100))
    report(store, "a", 10, 30)
    clock.advance(2_000)
    ask(store, "b", (20, 10), **day_limit(100))
    end(store, "b", 20, 10)
    end(store, "a", 10, 30, billed=False)

    found = store.run(account("o", KEY))
    assert found is not None and (found.day_spent, found.spent) == (40, 40)


@pytest.mark.parametrize(
    ("ms", "month"), [(0, 1970 * 12), (951_782_400_000, 2000 * 12 + 1), (951_868_800_000, 2000 * 12 + 2)]
)
def test_months_are_those_of_the_calendar(store: Store, clock: Clock, valkey: redis.Redis, ms: int, month: int) -> None:
    """1 January 1970, 29 February and 1 March 2000."""
    clock.set(ms)
    lease(store)
    ask(store, "a", (1, 1), **day_limit(100))
    assert int(valkey.hget("f1:{org:o}:money:key:k", "month") or 0) == month


def test_a_balance_is_what_was_granted_less_what_was_spent(store: Store) -> None:
    org = [Limit(scope="org", prepaid=True)]
    store.run(open_lease("o", "org", Figures(lease=1, granted=100, grants=1, spent=90)))
    reserved = ask_all(store, "a", org, (4, 10))
    assert isinstance(reserved, Reserved) and reserved.allowance_tokens == 3

    refused = ask_all(store, "b", org, (4, 10))
    assert isinstance(refused, Refused) and refused.reason == "balance"
    assert store.run(grant("o", 200, 2)) and not store.run(grant("o", 100, 1))
    assert isinstance(ask_all(store, "b", org, (4, 10)), Reserved)


#: Of a currency that has many for a dollar.
MILLIONS = [5_000_000 * UNITS + 7, 10**15 * UNITS - 1, 0]


@pytest.mark.parametrize("before", MILLIONS)
def test_a_balance_is_lent_to_the_unit_whatever_was_granted_and_spent_before(store: Store, before: int) -> None:
    """The sums are far beyond what Lua counts exactly; what is left is 100 units, then 0, then 50, then -3."""
    org = [Limit(scope="org", prepaid=True)]
    store.run(open_lease("o", "org", Figures(lease=1, granted=before + 100, grants=1, spent=before)))
    reserved = ask_all(store, "a", org, (40, 500))
    assert isinstance(reserved, Reserved) and reserved.allowance_tokens == 30
    store.run(settle("o", "a", ["org"], Usage(input_tokens=40, output_tokens=30), billed=True))
    assert isinstance(ask_all(store, "b", org, (1, 0)), Refused)

    assert store.run(grant("o", before + 150, 2)) and not store.run(grant("o", before + 10**6, 1))
    reserved = ask_all(store, "c", org, (0, 500))
    assert isinstance(reserved, Reserved) and reserved.allowance_tokens == 25
    assert store.run(late("o", "unseen", ("org",), 2, 53))
    assert store.run(settle("o", "c", ["org"], Usage(), billed=False))
    found = store.run(account("o", "org"))
    assert found is not None and (found.granted, found.spent, found.held) == (before + 150, before + 153, 0)
    assert isinstance(ask_all(store, "d", org, (1, 0)), Refused)


@given(costs=st.lists(st.integers(0, UNITS_MAX), max_size=30), before=st.sampled_from(MILLIONS))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_a_lease_has_spent_is_the_sum_of_what_was_charged_to_it(
    store: Store, costs: list[int], before: int
) -> None:
    """Up to 27 million under one lease; a day's cost stands still at more than any budget."""
    store.client.flushall()
    store.run(open_lease("o", "org", Figures(lease=1, spent=before)))
    for n, cost in enumerate(costs):
        assert store.run(late("o", f"r{n}", ("org",), 2, cost)) == (cost > 0)

    found = store.run(account("o", "org"))
    assert found is not None and found.spent == before + sum(costs)
    assert found.day_spent == found.month_spent == min(sum(costs), UNITS_MAX)


def test_a_budget_stays_spent_though_more_was_spent_than_is_counted(store: Store, clock: Clock) -> None:
    """3.6 million in a day. One request is not paid for after all, and gives 800,000 back; the others are beyond any
    budget still, until the day ends."""
    org = [Limit(scope="org", money_per_day=Decimal(900_000))]
    assert store.run(open_lease("o", "org", Figures(lease=1)))
    dear = Terms(prices=(0, 0, 800_000 * UNITS))
    need = Need(input_tokens=0, output_tokens=10**6, least_output_tokens=0)
    assert isinstance(store.run(reserve("o", "a", "k", "m", org, need, dear)), Reserved)
    usage = Usage(output_tokens=10**6)
    one = Report(request_id="a", key_id="k", scopes=("org",), usage=usage, hold_tokens=0, money_tokens=0)
    store.run(progress("o", [one]))
    for n in range(4):
        store.run(late("o", f"r{n}", ("org",), 2, 700_000 * UNITS))
    store.run(settle("o", "a", ["org"], usage, billed=False))

    found = store.run(account("o", "org"))
    assert found is not None and (found.spent, found.day_spent) == (2_800_000 * UNITS, UNITS_MAX)
    assert isinstance(ask_all(store, "b", org, (1, 0)), Refused)
    clock.advance(86_400_000)
    assert isinstance(ask_all(store, "b", org, (1, 0)), Reserved)


def test_of_a_large_balance_no_more_is_held_at_once_than_is_exact(store: Store) -> None:
    """Five million; two requests of 600,000 hold 900,000 together, and the next waits until one of them has ended. A
    token costs 1.2, which is more for a million of them than Lua counts exactly."""
    org = [Limit(scope="org", prepaid=True)]
    store.run(open_lease("o", "org", Figures(lease=1, granted=5_000_000 * UNITS, grants=1)))
    need = Need(input_tokens=0, output_tokens=500_000, least_output_tokens=0)
    price = sum_up(Decimal(1_200_000))

    def start(name: str) -> Reserved | Refused | Unleased:
        return store.run(reserve("o", name, "k", "m", org, need, Terms(prices=(0, 0, price))))

    told = [start(name) for name in "ab"]
    assert [one.allowance_tokens for one in told if isinstance(one, Reserved)] == [500_000, 250_000]
    refused = start("c")
    assert isinstance(refused, Refused) and refused.reason == "balance"
    store.run(settle("o", "a", ["org"], Usage(output_tokens=500_000), billed=True))
    assert isinstance(start("c"), Reserved)
    found = store.run(account("o", "org"))
    assert found is not None and (found.spent, found.held) == (600_000 * UNITS, 900_000 * UNITS)


def test_usage_is_charged_once_by_its_hold_by_the_figures_or_late(store: Store) -> None:
    """Ingest 5 is in the lease's figures; what comes with later ones was charged here, or is charged late, once."""
    lease(store, lease=5)
    ask(store, "a", (10, 0), **day_limit(100))
    end(store, "a", 10)
    assert not store.run(late("o", "a", (KEY,), 6, 10)), "its hold charged it"
    assert not store.run(late("o", "before", (KEY,), 5, 10)), "the figures have it"
    assert [store.run(late("o", "unseen", (KEY,), 6, 10)) for _ in range(2)] == [True, False]

    found = store.run(account("o", KEY))
    assert found is not None and found.spent == 20


def test_money_is_exact_beyond_doubles(store: Store) -> None:
    """A million tokens at 15 of the currency a million: the product of tokens and price is beyond 2^53."""
    price = units_up(Decimal("15.0000000001"))
    terms = Terms(prices=(price, price, price))
    lease(store)
    need = Need(input_tokens=999_999, output_tokens=0, least_output_tokens=0)
    limits = [Limit(scope=KEY, money_per_month=Decimal(100))]
    store.run(reserve("o", "a", "k", "m", limits, need, terms))
    store.run(settle("o", "a", [KEY], Usage(input_tokens=999_999), billed=True))

    found = store.run(account("o", KEY))
    assert found is not None and found.spent == -(-999_999 * price // 10**6)


def test_tokens_that_cost_next_to_nothing_are_counted_at_once(store: Store) -> None:
    """A unit for a million tokens of output: a unit pays for a million of them, which nobody counts one by one."""
    terms = Terms(prices=(7, 0, 1))
    lease(store)
    need = Need(input_tokens=999, output_tokens=1_500_000, least_output_tokens=0)
    reserved = store.run(reserve("o", "a", "k", "m", [Limit(scope=KEY, money_per_day=Decimal(1))], need, terms))
    assert isinstance(reserved, Reserved) and reserved.allowance_tokens == 2_000_000 - 7 * 999


def test_a_budget_tells_when_its_day_ends_and_its_month(store: Store, clock: Clock) -> None:
    """Unless what runs holds too much of it to tell."""
    clock.set(951_782_400_000 - 60_000)  # a minute before 29 February 2000
    lease(store)
    ask(store, "a", (100, 0), **day_limit(100))
    refused = ask(store, "b", (1, 1), **day_limit(100))
    assert isinstance(refused, Refused) and (refused.reason, refused.retry_after_ms) == ("day", None)
    end(store, "a", 100)

    refused = ask(store, "b", (1, 1), **day_limit(100))
    assert isinstance(refused, Refused) and (refused.reason, refused.retry_after_ms) == ("day", 60_000)
    refused = ask(store, "b", (1, 1), money_per_month=Decimal(100) / 10**10)
    assert isinstance(refused, Refused) and (refused.reason, refused.retry_after_ms) == ("month", 86_460_000)
    clock.advance(86_459_999)
    assert isinstance(ask(store, "b", (1, 1), money_per_month=Decimal(100) / 10**10), Refused)
    clock.advance(1)
    assert isinstance(ask(store, "b", (1, 1), money_per_month=Decimal(100) / 10**10), Reserved)


def test_who_overdrew_is_lent_no_more(store: Store) -> None:
    """It made more than was held for it; what it made beyond is not lent to it again."""
    lease(store)
    ask(store, "a", (10, 5), **day_limit(100))
    assert report(store, "a", 10, 40, money=50).allowance_tokens == 45
    found = store.run(account("o", KEY))
    assert found is not None and (found.spent, found.held) == (90, 10)


def test_money_that_was_told_is_not_taken_back(store: Store) -> None:
    """A worker that asks for less may have generated all that it was told meanwhile."""
    lease(store)
    ask(store, "a", (10, 30), **day_limit(100))
    assert report(store, "a", 10, 5, money=1).allowance_tokens == 30
    found = store.run(account("o", KEY))
    assert found is not None and (found.spent, found.held) == (20, 50)


def test_a_limit_beyond_what_lua_counts_is_a_limit(store: Store) -> None:
    reserved = ask(store, "a", (1, 1), tokens_per_minute=2**63 - 1)
    assert isinstance(reserved, Reserved) and reserved.left[0].tokens == 2**53 - 1 - 2
