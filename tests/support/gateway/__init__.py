"""Scripted engines and a gateway in front of them, for the gateway's tests."""
