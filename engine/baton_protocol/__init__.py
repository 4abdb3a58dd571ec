"""What crosses a process boundary: wire structs, configuration, block hashes, and the client of an engine.

Torch-free; every component may import it, and it imports none of them.
"""
