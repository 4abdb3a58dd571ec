"""Engines that users would choose instead, each in a virtual environment of its own."""
