"""A fetcher of models for tests."""
