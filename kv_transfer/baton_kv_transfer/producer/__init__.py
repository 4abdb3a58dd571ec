"""The producer side: publishes blocks to consumers, or writes blocks into consumers' memory.

producer_side      the entry point: the ROUTER socket and the dispatch of its messages
sessions           the handshakes with consumers
transfer_manager   offers transfers, and frees their blocks at the end
transfer_state     the data of transfers and subscribers, and the checks of requests
publisher          sends blocks, and the end of each transfer, to subscribers
early_messages     subscriptions that arrive before the offer
block_writer       push: writes blocks into consumers' memory
"""
