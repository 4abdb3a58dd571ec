"""Preview of a rollout or resize: every step that the planner takes from one spec to another, on a simulated cluster. Pure.

`rollout.py` runs the operator's own planner, `cluster.py` and `coordinator.py` simulate what is around it, and `steps.py`
holds the result.
"""
