"""A scheduler with a fake model and connector, and the client that checks its outputs."""
