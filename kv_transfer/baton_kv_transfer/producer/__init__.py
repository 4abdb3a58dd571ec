"""The producer side: publishes blocks to consumers, or writes blocks into consumers' memory.

producer_side         the entry point: the ROUTER socket and the dispatch of its messages
sessions              the handshakes with consumers
transfer_manager      the offered transfers, from the scheduler's offer until their blocks are free
transfer_state        the data of transfers and subscribers, and the checks of requests
publisher             sends blocks, and the end of each transfer, to subscribers
early_subscriptions   subscriptions that arrive before the scheduler offers the transfer
block_writer          push: writes blocks into consumers' memory
"""
