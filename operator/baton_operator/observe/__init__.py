"""Read the state of a service: its objects, its pods, and the replies of engines and coordinator.

- `observation`: reads the state that a reconcile needs.
- `freshness`: how recent the reads of a reconcile must be.
- `pod_clients`: HTTP clients of engines and coordinator.
"""
