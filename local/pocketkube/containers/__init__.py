"""Run containers as process groups on this machine.

- `container_runner`: one container from its first start to its last stop.
- `container_state`: waiting, running, terminated.
- `environment`: environment variables and the command line.
- `volumes`: volumes of a pod and their mounts.
- `probes`: startup, readiness and liveness probes.
- `backoff`: the delay before a restart.
- `container_log`: the log file, its rotation and its readers.
- `process`: the processes of one container.
- `exec_process`: a further command in a running container.
- `container_reaper`: the process that kills all containers when the kubelet ends.
- `usage`: the CPU time and the memory of containers.
"""
