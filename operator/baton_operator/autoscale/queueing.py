"""Estimate how long requests wait for one of several engines. Pure."""

from __future__ import annotations

from math import inf, log, sqrt


def wait_quantile_s(engines: int, offered: float, service_s: float, quantile: float) -> float:
    """Return a quantile of the waiting time in an M/M/c queue, in seconds.

    The utilization is u = offered / c. An arriving request waits with probability
    P = u^(sqrt(2 (c + 1)) - 1). The formula is from Sakasegawa 1977, "An approximation formula L_q
    = a rho^b / (1 - rho)". The wait of a request that waits is exponential with mean
    service_s / (c (1 - u)). So the quantile q is ln(P / (1 - q)) times that mean, or 0 if
    P <= 1 - q.

    The result is an upper estimate, because the service times of prompts vary less than an
    exponential distribution. In an M/M/c queue, all engines share one queue. Baton's gateway comes
    close to such a queue, because it sends each request to the engine with the least load.

    Args:
        engines: number c of engines, at least 1.
        offered: load, as the mean number of busy engines.
        service_s: mean time for which a request occupies an engine.
        quantile: the quantile q, between 0 and 1.

    Returns:
        Infinity if u is 1 or more.
    """
    utilization = offered / engines
    if utilization >= 1:
        return inf
    waits = utilization ** (sqrt(2 * (engines + 1)) - 1)
    if waits <= 1 - quantile:
        return 0.0
    return log(waits / (1 - quantile)) * service_s / (engines * (1 - utilization))
