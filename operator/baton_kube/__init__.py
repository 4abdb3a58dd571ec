"""The Kubernetes client of Baton's components: JSON requests over `kubernetes.aio`, and a mirror of a collection.

Objects are the dictionaries that the API server sent, so fields unknown to this code survive a round trip.
"""
