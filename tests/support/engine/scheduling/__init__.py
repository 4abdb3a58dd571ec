"""Schedulers with a fake model and connector, their client, and states with chosen requests."""
