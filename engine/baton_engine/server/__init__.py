"""The engine process: an engine core behind a ZMQ ROUTER and an admin HTTP server.

engine_core_proc  the process: its loop, its states and its shutdown
engine_io         the ROUTER and its thread
output_buffers    buffers for encoded outputs
request_owners    which client each request belongs to
utility_calls     utility RPC methods and their arguments
admin_server      health, readiness, drain, metrics and the utility methods over HTTP
access            refuses clients without the service key, and counts them
"""
