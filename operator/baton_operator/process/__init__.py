"""The process of the operator.

- `operator_process`: acquires the Lease, then watches and reconciles.
- `leader`: acquires and renews the Lease.
- `kopf_thread`, `kopf_settings`: runs kopf in a thread, with everything but its watches turned off.
- `kopf_run`: the runtime of a process that `kopf run` started, without a Lease.
- `watch_session`: the HTTP session in which kopf sends its requests.
- `runtime`: the parts of the process, except kopf.
- `operator_metrics`: the metrics, and the HTTP server of `/metrics` and `/health`.
"""
