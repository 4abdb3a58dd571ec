"""The built-in autoscaler: sizes prefill and decode separately from targets for TTFT and ITL. Pure: no client, no clock.

`windows` turns scrapes of pods into measurements, `policy.decide` turns measurements into a size and a sentence that says why,
`history` is what one decision must know of those before it.
"""
