"""The parts that the transports `tcp` and `shm` share.

socket_transport   the base class of both transports
peer_link          the client of one peer: requests and their replies
peer_server        the server for the peers that connect
framed_socket      messages and data over one socket, without blocking
row_io             readv and writev between rows of memory and a socket
"""
