"""The protocol: wire structs, configuration, block hashes and the client of an engine.

Every component may import it. It imports no other component, and no torch.
"""
