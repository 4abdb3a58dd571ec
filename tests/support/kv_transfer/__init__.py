"""Helpers of the KV transfer tests. They add the transport `inproc`, which copies in one process."""

from baton_kv_transfer.transports.choose import LOADERS
from support.kv_transfer.inproc_transport import InprocTransport

LOADERS["inproc"] = lambda: InprocTransport
