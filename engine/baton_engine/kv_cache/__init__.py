"""The KV blocks of an engine: who holds which, the prefix cache, swapped and offloaded blocks. Only the books, no torch."""
