"""A local cluster and an expert-parallel service on it, for the end-to-end tests of a service."""
