"""Traffic to pods.

- `service_proxy`: a TCP listener for each port of a Service.
- `ingress_proxy`: one HTTP listener for all Ingresses.
- `routes`: endpoints and routes from objects, as pure functions.
"""
