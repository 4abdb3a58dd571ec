"""A Kubernetes cluster of processes on one machine. README.md lists what it supports.

- `cluster`: all components as child processes of one supervisor.
- `control_plane`: starts and stops an API server, pocketkube's own or a real one.
- `apiserver`: pocketkube's own API server.
- `controllers`: Deployments, ReplicaSets, and the binding of pods to the node.
- `kubelet`: the node and its pods.
- `containers`: one container as a process group.
- `proxy`: Services by TCP, Ingresses by HTTP.
- `children`, `lifecycle`: child processes, which end with their parent.
- `networks`, `loopback`, `ports`: address ranges, addresses and ports of this machine.
- `certificates`, `kubeconfig`: files with keys and credentials.
- `events`, `conditions`, `timestamps`: parts of Kubernetes objects.
"""
