"""Creates the agent of a transport."""

from __future__ import annotations

from baton_kv_transfer.agent.agent import Agent
from baton_kv_transfer.agent.nixl_agent import NixlAgent
from baton_kv_transfer.agent.transport_agent import TransportAgent


def create_agent(name: str, transport: str = "ucx", host: str = "") -> Agent:
    """Create an agent called `name` that moves bytes over `transport`.

    Args:
        name: the name under which peers know the agent.
        transport: a value of kv_transfer.transport. UCX and NIXL are loaded only for a transport
            that uses them.
        host: address of this machine at which peers reach the agent. Empty: $POD_IP, or
            127.0.0.1 if $POD_IP is not set. NIXL ignores `host` and chooses an address.

    Raises:
        ValueError: the transport is unknown, or it is nixl and NIXL is not installed.
        OSError: `host` is not an address of this machine.
        UCXError: the transport uses UCX, and UCX is missing or cannot start.
    """
    if transport == "nixl":
        return NixlAgent(name)
    return TransportAgent(name, transport, host)
