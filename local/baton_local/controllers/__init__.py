"""The controllers an embedded control plane needs beside its API server: Deployments, ReplicaSets and a trivial scheduler.

Each is a pure plan (`deployment.py`, `replicaset.py`: from observed objects to the next step); `loop.py` observes and applies.
A real control plane brings its own; do not run these beside it.
"""
