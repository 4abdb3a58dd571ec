"""How the local components talk to an API server: plain JSON objects, a list+watch cache, events."""

from baton_local.client.api import Api, ApiError, Json, key_of, timestamp
from baton_local.client.events import EventRecorder
from baton_local.client.reflector import Reflector

__all__ = ["Api", "ApiError", "EventRecorder", "Json", "Reflector", "key_of", "timestamp"]
