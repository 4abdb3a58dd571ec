"""A Kubernetes cluster of processes on one machine. README.md lists what it supports.

- `cluster`: all components as child processes of one supervisor.
- `control_plane`: starts and stops an API server, pocketkube's own or a real one.
- `apiserver`: pocketkube's own API server.
- `controllers`: Deployments, ReplicaSets, and the binding of pods to the node.
- `kubelet`: the node and its pods.
- `containers`: one container as a process group.
- `proxy`: TCP proxies for Services, an HTTP proxy for Ingresses.
- `child_processes`, `lifecycle`: child processes, which end when their parent ends.
- `networks`, `loopback`, `ports`: address ranges, addresses and ports of this machine.
- `websockets`: the handshake, the messages and the end of WebSockets.
- `certificates`, `kubeconfig`: files with keys and credentials.
- `private_files`: files that other users cannot read, folders that they cannot write.
- `event_recorder`, `conditions`, `timestamps`: Events, conditions and times of the Kubernetes API.
"""
