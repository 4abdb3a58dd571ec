"""The transport `tcp`: authenticated sockets, for host memory and untrusted networks.

tcp_transport   transfers that this side started
tcp_server      the peers that connect, and their requests

`sockets/row_io.py` moves the bytes.
"""
