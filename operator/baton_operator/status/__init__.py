"""The status of a service: conditions, counts and Events.

- `report`: the whole status.
- `report_group`, `report_model`, `report_topology`, `report_update`: the parts of it.
- `report_events`: the Events that follow from a report.
- `diagnose`: why pods are not ready.
- `status_probes`: requests that only the status needs.
- `status_writer`: writes the status and the Events.
"""
