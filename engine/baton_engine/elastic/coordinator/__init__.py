"""The coordinator of an expert-parallel group: a separate process without torch.

coordinator_cli.py      `baton-coordinator`
coordinator.py          the process: sockets, controller, HTTP
coordinator_http.py     topology, health and metrics over HTTP
coordinator_metrics.py  Prometheus metrics
checks.py               validation of requests and statuses
topology_controller.py  computes at most one operation from desired members and statuses
controller_config.py    deadlines and thresholds
roster.py               the latest status of each rank
group_observation.py    the change that is needed now
operation.py            one change of the topology, and its progress on the ranks
placement/              the placement of experts on ranks, and its balance
retries.py              delays after failures
stalls.py               detection of stalled engine loops
topology_report.py      the response to GET /topology
"""
