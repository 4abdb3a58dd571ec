"""Plan the next step of a group of member pods. Pure: no client and no clock.

- `plan_members`: calls the planner of a group, with the sizes and timeouts of the spec.
- `plan_group`: the planner of independent engines.
- `plan_expert_group`: the planner of the ranks of an expert-parallel group.
- `refused_pods`: pods that the API server refuses, and when to create them again.
- `topology_view`: queries on a topology for the planner, and the topology for the status.
"""
