"""The transport `tcp`: authenticated sockets of our own, for host memory and networks that are not trusted.

lane       the Lane: transfers of this side
clients    peers that connected, and what they ask for
"""
