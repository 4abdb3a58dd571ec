"""Requests that share blocks: samples of one prompt, and the beams of a beam search."""
