"""Small threaded HTTP servers that respond in JSON.

json_server      base classes of all servers
bounded_server   a server for untrusted clients, with limits on connections, time and bytes
"""
