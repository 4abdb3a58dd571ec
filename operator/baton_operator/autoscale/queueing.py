"""The time that a request waits for one of several engines. Pure."""

from __future__ import annotations

from math import inf, log, sqrt


def wait_quantile_s(engines: int, offered: float, service_s: float, quantile: float) -> float:
    """Return a quantile of the wait in an M/M/c queue in seconds; infinite if it is overloaded.

    The utilization is u = offered / engines. An arrival waits with probability
    P = u^(sqrt(2 (c + 1)) - 1) (Sakasegawa 1977, "An approximation formula L_q = a rho^b / (1 -
    rho)"). Its wait is exponential with mean service / (c (1 - u)). So the quantile q is
    ln(P / (1 - q)) times that mean, and 0 if P <= 1 - q.

    Requests go to the engine with the least load, which is close to one queue. Prompts vary less
    than exponentially, so the result is an upper estimate.

    Args:
        engines: c, at least 1.
        offered: load, as the mean number of busy engines.
        service_s: mean time that a request occupies an engine.
        quantile: q, between 0 and 1.
    """
    utilization = offered / engines
    if utilization >= 1:
        return inf
    waits = utilization ** (sqrt(2 * (engines + 1)) - 1)
    if waits <= 1 - quantile:
        return 0.0
    return log(waits / (1 - quantile)) * service_s / (engines * (1 - utilization))
