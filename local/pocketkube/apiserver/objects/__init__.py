"""Reads and writes of objects with Kubernetes' semantics.

- `registry`: get, list, create, update, patch.
- `strategies`: the steps of a write that only one kind has.
- `conflicts`: resourceVersion and uid of a request against the stored object.
- `patches`: JSON, merge and strategic merge patches.
- `server_side_apply`: field ownership, merges and conflicts of managers.
- `subresources`: scale and binding.
- `tokens`: bearer tokens and TokenRequest.
- `deletion`: DELETE, grace periods, finalizers.
- `garbage_collection`: dependents, content of namespaces and kinds, old events.
"""
