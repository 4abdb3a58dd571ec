"""The built-in autoscaler: sizes prefill and decode separately from targets for TTFT and ITL.

- `autoscaler`: scrapes, decides and keeps the sizes. All other modules but `scrape` are pure.
- `inputs`: groups and scrape targets from the observed pods.
- `scrape`: HTTP requests for the metrics of pods.
- `windows`: measurements over a time window, from scrapes.
- `recommendations`: the size that each measurement recommends.
- `policy`: the decision: the largest recommendation, stabilised and bounded.
- `decision_history`: the earlier decisions that a decision depends on.
- `queueing`: the waiting time in an M/M/c queue.
- `settings`: targets and bounds from the spec.
"""
