"""API servers that are started and stopped the same way, and entered through the kubeconfig that they write.

interface: what both have in common.
embedded: pocketkube's own API server.
real: kube-apiserver with etcd, controllers and scheduler.
"""
