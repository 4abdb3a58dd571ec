"""A worker's KV memory.

layout          ranges of heads, the shape of the memory, and the addresses of workers
slot_memory     the memory as its connector sees it; host memory
staged_memory   blocks that travel through slots of host memory
checksum        the checksum of a block
"""
