"""Read and write objects with the semantics of Kubernetes.

- `object_registry`: reads, creates, updates and patches objects.
- `request_bodies`: decodes the object in a request body.
- `system_fields`: the metadata that the server sets.
- `strategies`: the kind-specific steps of a write.
- `conflicts`: compares resourceVersion and uid of a request with those of the stored object.
- `patches`: JSON, merge and strategic merge patches.
- `server_side_apply`: field ownership, merges and conflicts of managers.
- `subresources`: scale and binding.
- `tokens`: bearer tokens and TokenRequest.
- `deletion`: DELETE, grace periods, finalizers.
- `garbage_collection`: deletes dependents, the content of namespaces and CRDs, and old Events.
"""
