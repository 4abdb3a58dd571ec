"""The rendezvous store, through which the ranks of a process group exchange addresses.

store_server.py       the store, in a thread of the process that opens it; without torch
client_connection.py  one client's connection, on the server
values.py             the stored keys and values, and their limits
handshake.py          mutual authentication by a shared secret
wire.py               messages and sockets
socket_store.py       the client, as a torch Store
"""
