"""The built-in autoscaler: sizes prefill and decode groups by targets for TTFT and ITL.

- `autoscaler`: scrapes pods, decides and stores the sizes.
- `inputs`: groups and scrape targets, from the observed pods.
- `scrape`: HTTP requests for the metrics of pods.
- `windows`: measurements over a time window, from several scrapes.
- `recommendations`: the size that each measurement recommends.
- `holds`: why the size must stay, for example because an engine returns no metrics.
- `policy`: the decided size, after stabilization, step limits and bounds.
- `decision_history`: the earlier decisions on which a decision depends.
- `queueing`: the waiting time in an M/M/c queue.
- `settings`: targets and bounds from the spec.

All modules except `autoscaler` and `scrape` are pure.
"""
