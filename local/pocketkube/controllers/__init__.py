"""The controllers of the embedded control plane.

- `controller_manager`: watches objects, and applies the plans of the pure functions below.
- `scheduler`: the binding of pods to the node.
- `work_queue`: keys to reconcile, with retries.
- `deployment`: rolling updates, as a pure function.
- `replicaset`: pods to create and to delete, as a pure function.
"""
