"""The client of one engine.

engine_client   sends requests and control messages, and receives outputs
request_stream  async iterator over the outputs of one request
heartbeat       liveness and reported load of the engine
"""
