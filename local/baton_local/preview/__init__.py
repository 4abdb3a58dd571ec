"""Preview of a rollout or resize: every step that the planner takes from one spec to another, on a simulated cluster. Pure.

`rollout.py` runs the operator's own planner. `cluster.py` and `coordinator.py` simulate pods and coordinator. `steps.py` has
the structs of the result.
"""
