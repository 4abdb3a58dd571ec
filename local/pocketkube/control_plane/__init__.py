"""Control planes, which have the same methods `start` and `stop`.

Clients connect with the kubeconfig that the control plane writes.

- `embedded`: pocketkube's own API server.
- `real`: kube-apiserver with etcd, controllers and scheduler.
"""
