"""API servers that have the same methods `start` and `stop`.

Clients connect with the kubeconfig that the server writes.

- `embedded`: pocketkube's own API server.
- `real`: kube-apiserver with etcd, controllers and scheduler.
"""
