"""Helpers for the tests of the operator.

- `services`: services and pods for tests of pure functions.
- `simulation`: the operator on a simulated cluster, without processes.
- `operator_process`: an operator process on a real API server.
- `api_proxy`: injects faults between the operator and the API server.
- `autoscale_pods`: pods with metrics for the autoscaler.
- `http_routes`, `pod_security`: rules of Kubernetes that tests apply.
"""
