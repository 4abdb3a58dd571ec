"""The next step of a group of member pods. Pure: no client and no clock.

- `plan_group`: engines that are independent of each other.
- `plan_expert_group`: ranks of an expert-parallel group.
- `topology_view`: what the planner reads from a topology, and what the status records of it.
"""
