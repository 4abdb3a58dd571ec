"""Requests that share blocks.

samples       samples of one prompt
beams         beam searches as requests and blocks
beam_search   one step of a beam search, as a pure function
"""
