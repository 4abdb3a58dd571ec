"""Forward network traffic to pods.

- `service_proxy`: a TCP listener for each port of a Service.
- `ingress_proxy`: one HTTP listener for all Ingresses.
- `service_routes`: computes endpoints and routes from API objects, as pure functions.
"""
