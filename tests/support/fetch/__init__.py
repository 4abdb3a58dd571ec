"""The model fetcher as a process, for its tests."""
