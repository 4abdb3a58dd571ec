"""The built-in autoscaler: sizes prefill and decode separately from targets for TTFT and ITL.

Pure are `windows`, which turns scrapes of pods into measurements, `policy.decide`, which turns measurements into a size and a
sentence that says why, `history`, what one decision must know of those before it, `settings` (from the spec) and `facts` (from
pods). `autoscaler` lets them work together, with `scrape` for the network.
"""
