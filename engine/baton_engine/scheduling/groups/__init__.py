"""Requests that share blocks.

samples       samples of one prompt
beams         requests and blocks of beam searches
beam_search   one step of a beam search, as a pure function
"""
