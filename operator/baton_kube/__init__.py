"""The Kubernetes client of Baton's components.

- `client`: JSON requests by path, over `kubernetes.aio`.
- `reflector`: a local copy of one collection.

Objects are the dictionaries that the API server sent, so fields unknown to this code survive a
round trip.
"""
