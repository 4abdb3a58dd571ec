"""Small HTTP servers on threads, with JSON answers.

json_server      the base of all of them
bounded_server   a server for untrusted clients, bounded in connections, time and bytes
"""
