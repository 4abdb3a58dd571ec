"""Paged KV caches for kernel tests, and the script that compiles every Triton kernel."""
