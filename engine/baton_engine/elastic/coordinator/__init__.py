"""The coordinator of an expert-parallel group: a separate process without torch.

coordinator_cli.py      `baton-coordinator`
coordinator.py          the process: sockets, controller, HTTP
coordinator_http.py     topology, health and metrics over HTTP
coordinator_metrics.py  Prometheus metrics
topology_validation.py  validation of topology requests and of statuses
topology_controller.py  changes the topology by at most one operation at a time
topology_planner.py     decides the next generation: its members and their experts
controller_config.py    deadlines and thresholds
roster.py               the latest status of each rank
operation.py            one change of the topology, and its progress on the ranks
placement/              the placement of experts on ranks, and its balance
backoff.py              delays after failures
stalls.py               detection of stalled engine loops
topology_report.py      the response to GET /topology
"""
