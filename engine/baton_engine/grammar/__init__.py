"""Structured output: grammars compiled from a request's specification, and the tokens they allow. No torch."""
