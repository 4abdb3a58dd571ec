"""The transport `tcp`: authenticated sockets, for host memory and networks that are not trusted.

lane       transfers that this side began
clients    peers that connected, and what they ask for

`transports/rows.py` moves every byte, by readv and writev; `transports/framed_socket.py` cuts the bytes into frames.
"""
