"""The group as the coordinator sees it. The coordinator is a process of its own and needs no torch.

coordinator_cli.py      `baton-coordinator`
coordinator.py          the process: sockets, controller, HTTP
coordinator_http.py     topology, health and metrics over HTTP
coordinator_metrics.py  Prometheus metrics
checks.py               requests and statuses that are refused
controller.py           desired members and statuses to at most one operation
controller_config.py    deadlines and thresholds
roster.py               the latest status of each rank
observation.py          the change that is needed now
operation.py            one change of the topology
operation_progress.py   how far the ranks are with it
expert_placement.py     which rank holds which experts
balance.py              when a new placement is worth its cost
retries.py              delays after failures
stalls.py               engine loops that are stalled
topology_report.py      the answer to GET /topology
"""
