"""API servers that are started and stopped in the same way.

Clients connect with the kubeconfig that they write.

- `interface`: what both have in common.
- `embedded`: pocketkube's own API server.
- `real`: kube-apiserver with etcd, controllers and scheduler.
"""
