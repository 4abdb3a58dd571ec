"""The coordinator of an expert-parallel group: a separate process without torch.

coordinator_cli.py      `baton-coordinator`
coordinator.py          the process: sockets, controller, HTTP
coordinator_http.py     topology, health and metrics over HTTP
coordinator_metrics.py  Prometheus metrics
checks.py               validation of requests and statuses
controller.py           computes at most one operation from desired members and statuses
controller_config.py    deadlines and thresholds
roster.py               the latest status of each rank
observation.py          the change that is needed now
operation.py            one change of the topology, and its progress on the ranks
expert_placement.py     the placement of experts on ranks
balance.py              load of the experts, and when to rebalance
rebalance_steps.py      the moves with the highest gain, for a rebalance with a limit
retries.py              delays after failures
stalls.py               detection of stalled engine loops
topology_report.py      the response to GET /topology
"""
