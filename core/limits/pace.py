"""How a request's output comes, by which its hold is reckoned: at a pace, and up to a likely length. Pure.

A hold that covered all of `max_tokens` would freeze a key with a few long answers; one that covered all that can come
in a minute would leave a third of a full window unused, since what is in the window leaves it meanwhile. So of what is
held only the next moments need room now (window.lua): reports come once a second, and one may be late. What comes after
is laid ahead, step by step, against what will have left by then: at first at the pace of the model's fastest answer,
then at its own, as measured. A stream that keeps to it finds room whenever it reports. One that speeds up may find
none, which is debt; it is not cut.
"""

from __future__ import annotations

import math

#: So long what is generated counts at most, seconds: the window, a bin, the rest of the second between two reports, and
#: what is firm. (window.lua)
WINDOW_S = 62.25
#: What a hold covers at once: until the next report, which comes once a second and may be late.
MARGIN_S = 1.25
#: A pace measured over less than this is not trusted, seconds.
MEASURED_S = 2.0


def in_window(pace: float, tokens: int) -> int:
    """Of so many tokens those that can come in one window, at a pace of tokens a second; 0: all come at once."""
    return min(tokens, math.ceil(pace * WINDOW_S)) if pace else tokens


def likely(pace: float, left_tokens: int, usual_tokens: int) -> int:
    """Output that is still to come.

    `left_tokens`: that may; `usual_tokens`: that such answers still come to, where the client named no limit (0: not
    known). One that is longer than usual is reckoned with for a margin more, again and again.
    """
    return min(left_tokens, max(usual_tokens, math.ceil(pace * MARGIN_S))) if usual_tokens else left_tokens


def measured(model_pace: float, age_s: float, tokens: int, last_s: float, last_tokens: int) -> float:
    """Tokens a second: the faster of all that it has made so far and what it has made since the last report. `age_s`
    and `last_s`: how long ago it began, and that report was. The token that is about to come counts: what is given back
    for want of it is not there later, when the window is full."""
    if age_s < MEASURED_S:
        return model_pace
    return max((tokens + 1) / age_s, last_tokens / last_s if last_s > 0 else 0.0)
