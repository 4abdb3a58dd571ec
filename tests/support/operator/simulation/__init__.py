"""Simulations of the cluster around the operator.

- `simulated_service`: a service on the simulated cluster, with the real operator.
- `api_server`, `watches`, `nodes`, `coordinator`: the parts of that cluster.
- `service_checks`: invariants of every step of the operator in it.
- `convergence_machine`: the state machine over it.
- `simulated_expert_group`: ranks and their coordinator, for the planner of expert-parallel groups.
"""
