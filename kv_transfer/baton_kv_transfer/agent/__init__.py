"""The transfer agent: registered memory, peers by name, one-sided transfers with notifications.

agent             the interface, with NIXL's names and semantics
create            the factory
transport_agent   an agent over Baton's transports
nixl_agent        an agent over the NIXL library
nixl_library      loading NIXL, and sealing its metadata
descriptors       lists of memory ranges: checks and merging
"""
