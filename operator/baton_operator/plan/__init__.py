"""The next step of a group of member pods. No client and no clock.

- `plan_members`: chooses the planner of a group and passes it the figures of the spec.
- `plan_group`: engines that are independent of each other.
- `plan_expert_group`: ranks of an expert-parallel group.
- `refused_pods`: pods that the API server refuses, and when to create them again.
- `topology_view`: what the planner reads from a topology, and what the status records of it.
"""
