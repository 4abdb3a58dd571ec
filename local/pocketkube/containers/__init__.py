"""Containers as process groups of this machine.

- `runner`: one container from its first start to its last stop.
- `container_state`: waiting, running, terminated.
- `environment`: environment variables and the command line.
- `volumes`: volumes of a pod and their mounts.
- `probes`: startup, readiness and liveness probes.
- `backoff`: the delay before a restart.
- `container_log`: the log file, its rotation and its readers.
- `process`: a process group that ends with the kubelet.
- `guardian`: the process that ends what a killed kubelet leaves.
"""
