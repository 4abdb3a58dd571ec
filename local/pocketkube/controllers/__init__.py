"""The controllers of the embedded control plane.

- `controller_manager`: watches, work queue, and the binding of pods to the node.
- `deployment`: rolling updates, as a pure function.
- `replicaset`: pods to create and to delete, as a pure function.
"""
