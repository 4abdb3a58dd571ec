"""Groups of requests that share KV blocks.

samples       samples of one prompt
beams         beam searches: their requests and KV blocks
beam_search   one step of a beam search, as a pure function
"""
