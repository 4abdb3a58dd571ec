"""A model fetcher, a model hub and a store for tests."""
