"""Preview of a rollout or resize: the planner's steps on a simulated cluster.

- `rollout`: runs the operator's own planner.
- `target`: the desired state of a service, and the changes between two desired states.
- `simulated_cluster`: the simulated pods.
- `simulated_coordinator`: the simulated coordinator.
- `steps`: the structs of the result.
"""
