"""Kubernetes as Baton's components use it: a JSON client over `kubernetes.aio`, and a mirror of a collection.

Objects stay the dictionaries that the API server sent, so fields that this code does not know survive a round trip.
"""
