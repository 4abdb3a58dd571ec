"""Helpers of the KV transfer tests. They register the transport `inproc` within one process."""

from baton_kv_transfer.transports.transport_selection import LOADERS
from support.kv_transfer.inproc_transport import InprocTransport

LOADERS["inproc"] = lambda: InprocTransport
