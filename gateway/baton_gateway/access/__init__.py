"""Access: decides which requests the gateway accepts, and how many at the same time.

Modules:
    api_keys: authentication by API key.
    auth_delays: delays for clients that guess API keys.
    admission: the limits on sequences in flight, per gateway and per client.
    scale_from_zero_queue: requests that wait for the first decode engine.
    graceful_shutdown: the phase in which clients move to other gateways.
"""
