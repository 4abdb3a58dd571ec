"""A worker's KV memory.

layout          ranges of heads, the shape of the memory, and the addresses of workers
slot_memory     SlotMemory: slots that peers read and write; HostMemory: each block is its own slot
staged_memory   StagedMemory: blocks are copied through slots of host memory
checksum        the checksum of a range of heads of a block
"""
