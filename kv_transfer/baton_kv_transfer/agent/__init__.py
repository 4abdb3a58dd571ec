"""The transfer agent: registered memory, peers by name, one-sided transfers with notifications.

agent             the interface, with NIXL's names and semantics
create            creates an agent
transport_agent   an agent over Baton's transports
nixl_agent        an agent over the NIXL library
nixl_library      loads NIXL, creates NIXL's agent, and adds a digest to NIXL's metadata
descriptors       checks and merges lists of memory ranges
"""
