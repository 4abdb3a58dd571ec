"""What exists: the service's objects, its pods, and the replies of engines and coordinator.

- `observation`: reads everything that a reconcile needs.
- `freshness`: how recent the reads must be.
- `pod_clients`: HTTP clients of engines and coordinator.
"""
