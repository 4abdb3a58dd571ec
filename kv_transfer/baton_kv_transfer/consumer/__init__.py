"""The consumer's side: it loads blocks from producers and verifies them.

consumer_side    the entry point, called by the connector's thread
load_manager     moves each load through its states
load_state       the states and data of a load and of its per-rank transfers
block_verifier   reads published blocks and verifies their checksums
read_window      which blocks are read from a peer next
peer             the connection and the handshake with one worker of a producer
peer_registry    the peers that are connected
"""
