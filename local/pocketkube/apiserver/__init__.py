"""Kubernetes' REST semantics for a frozen table of kinds and for custom resources, in memory.

- `serving`: HTTP requests, watches, discovery, tables.
- `cluster_state`: one cluster's objects and rules, put together.
- `objects`: reads and writes of objects.
- `schema`: kinds and their fields.
- `store`: the objects, their index and their history.
- `errors`: Status objects of refusals.
- `resources`: the frozen table of built-in kinds.
"""
