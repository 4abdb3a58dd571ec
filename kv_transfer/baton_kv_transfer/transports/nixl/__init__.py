"""The transport `nixl`: the NIXL library moves every byte.

agent      an agent of the library, polled by a thread; removal of peers and the fence, which the library lacks
library    loading the library, making its agent, and the digest of its metadata
"""
