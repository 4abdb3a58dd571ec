"""An API server with the REST semantics of Kubernetes. All objects are in memory.

- `serving`: HTTP requests, watches, discovery, tables.
- `cluster_state`: one cluster's objects and the operations on them.
- `objects`: reads and writes of objects.
- `schema`: kinds and their fields.
- `store`: the objects, their index and their history.
- `errors`: errors as metav1.Status.
- `resources`: the table of built-in kinds.
"""
