"""The transfer agent: registered memory, peers by name, one-sided transfers with notifications.

An agent reads 64 bytes from the memory of its peer:

>>> import numpy as np
>>> from baton_kv_transfer.agent.agent_factory import create_agent
>>> ours, theirs = np.zeros(8, dtype=np.int64), np.arange(8, dtype=np.int64)
>>> agent, peer = create_agent("agent", "tcp"), create_agent("peer", "tcp")
>>> registered = agent.register_memory([(ours.ctypes.data, 64, 0, "")])
>>> registered = peer.register_memory([(theirs.ctypes.data, 64, 0, "")])
>>> name = agent.add_remote_agent(peer.get_agent_metadata())
>>> local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", [(ours.ctypes.data, 64, 0)])
>>> remote = agent.prep_xfer_dlist(name, [(theirs.ctypes.data, 64, 0)])
>>> handle = agent.make_prepped_xfer("READ", local, [0], remote, [0], b"a notification")
>>> state = agent.transfer(handle)
>>> while agent.check_xfer_state(handle) == "PROC": pass

agent             the interface, with NIXL's names and semantics
agent_factory     creates an agent
transport_agent   an agent over Baton's transports
nixl_agent        an agent over the NIXL library
nixl_library      loads NIXL, creates NIXL's agent, and adds a digest to NIXL's metadata
descriptors       checks and merges lists of memory ranges

Where NIXL's names are:

nixl_agent(name, config)                 agent_factory.create_agent(name, transport)
the methods of nixl_agent                agent.Agent
backend                                  a transport, in baton_kv_transfer.transports
nixl_prepped_dlist_handle                agent.DlistHandle
nixl_xfer_handle                         agent.XferHandle
nixlRegDList, nixlXferDList              agent.RegDescs, descriptors.XferDescs
"""
