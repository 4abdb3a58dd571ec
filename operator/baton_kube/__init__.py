"""The Kubernetes client of Baton's components.

- `client`: JSON requests by path, over `kubernetes.aio`.
- `reflector`: a local copy of one collection.

Objects are dictionaries, exactly as the API server sent them. So an object that is read, changed
and written back keeps the fields that this code does not know.
"""
