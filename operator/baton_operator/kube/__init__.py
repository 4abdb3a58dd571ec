"""Access to the Kubernetes API for the operator, on top of `baton_kube`.

- `objects`: reads and writes of objects by kind.
- `events`: Kubernetes Events about a service.
"""
