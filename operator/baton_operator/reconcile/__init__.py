"""The reconciles of services.

- `controller`: runs the queued reconciles.
- `reconciler`: the steps of one reconcile, in order.
- `desired`: the desired state of a service, collected from the builders.
- `drain`: sends `POST /drain` to the members that are marked as draining.
- `apply`: writes the difference between the desired and the observed state.
"""
