"""The consumer side: loads blocks from producers and verifies them.

consumer_side     the entry point, called by the connector's thread
load_manager      moves each load through its states
load_state        the states and data of a load and of its per-rank transfers
rank_transfers    decides which heads are requested from which worker of a producer
published_blocks  checks and records the blocks of a PUBLISH
block_verifier    reads published blocks and verifies their checksums
read_window       limits the bytes in flight from a peer, and chooses the next blocks to read
peer              the connection and the handshake with one worker of a producer
peer_registry     the peers that are connected
"""
