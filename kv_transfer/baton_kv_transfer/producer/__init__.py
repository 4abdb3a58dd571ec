"""The producer's side: it publishes blocks to consumers, or writes them into their memory.

producer_side      the entry point: the ROUTER socket and the dispatch of its messages
sessions           the consumers' handshakes
transfer_manager   what is offered, published and held
transfer_state     the data of transfers and subscribers, and the checks of requests
early_messages     subscriptions that arrive before the offer
block_writer       push: writes into consumers' memory
"""
