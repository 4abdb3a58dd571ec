"""The reconciles of services.

- `controller`: runs the queued reconciles.
- `reconciler`: the steps of one reconcile, in order.
- `reconcile_state`: the observed state of one reconcile, the results of its steps, and its outcome.
- `desired`: the desired state of a service, collected from the builders.
- `drain`: sends `POST /drain` to the members that are marked as draining.
- `apply`: writes the difference between the desired and the observed objects, except member pods.
- `member_reconciler`: takes the next step of each group of members.
"""
