"""The operator's use of the Kubernetes API, on top of `baton_kube`.

- `kinds`: reads and writes by kind instead of by path.
- `events`: Kubernetes Events about a service.
- `leader`: leader election with a Lease.
"""
