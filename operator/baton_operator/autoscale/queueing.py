"""How long a request waits for one of several engines. Pure."""

from __future__ import annotations

from math import inf, log, sqrt


def wait_quantile_s(engines: int, offered: float, service_s: float, quantile: float) -> float:
    """Quantile of the wait in an M/M/c queue, seconds; infinite for an overloaded one.

    With u = offered / engines an arrival waits with probability P = u^(sqrt(2 (c + 1)) - 1) (Sakasegawa 1977, "An approximation
    formula L_q = a rho^b / (1 - rho)"), and then for an exponential time of mean service / (c (1 - u)); so the quantile q is
    ln(P / (1 - q)) times that mean, and 0 where P <= 1 - q. Requests go to the engine with the least load, which comes close to
    one queue; prompts vary less than exponentially, so it errs upwards.

    Args:
        engines: c, at least 1.
        offered: load in engines: the mean number that would be busy.
        service_s: mean time that a request keeps an engine busy.
        quantile: q, between 0 and 1.
    """
    utilization = offered / engines
    if utilization >= 1:
        return inf
    waits = utilization ** (sqrt(2 * (engines + 1)) - 1)
    if waits <= 1 - quantile:
        return 0.0
    return log(waits / (1 - quantile)) * service_s / (engines * (1 - utilization))
