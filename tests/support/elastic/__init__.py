"""Coordinators, ranks and waves for tests of expert-parallel groups."""
