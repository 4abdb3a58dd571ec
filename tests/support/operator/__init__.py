"""Simulations, fakes and builders for the tests of the operator.

- `services`: services and pods for tests of pure functions.
- `service_simulation`: a service on a simulated cluster (`simulated_*`) with the real operator.
- `service_checks`: invariants of every step of the operator in that simulation.
- `convergence_machine`: the state machine over it.
- `expert_group_simulation`: ranks and their coordinator, for the planner of expert-parallel groups.
- `autoscale_simulation`, `autoscale_pods`: a service under load, for the autoscaler.
- `operator_process`, `api_server`, `fake_members`: an operator process on a real API server.
- `api_proxy`: injects faults between the operator and the API server.
- `network_policies`: which connections a set of network policies admits.
"""
