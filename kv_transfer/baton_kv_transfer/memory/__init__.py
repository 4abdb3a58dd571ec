"""A worker's KV memory.

layout          ranges of heads, the shape of the memory, and the addresses of workers
slot_memory     the interface of the memory, divided into slots; memory that peers reach directly
staged_memory   memory whose blocks are copied through slots of host memory
checksum        the checksum of a range of heads of a block
"""
