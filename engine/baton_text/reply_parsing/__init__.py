"""Divides generated texts into reasoning, content and tool calls.

reply_format   chooses the formats of a model, and how one reply is generated and parsed
reply_parser   divides the text of one reply as it arrives
reply_grammar  the grammar of a reply with reasoning or tool calls
tool_formats   how models of each family write tool calls
reasoning      how models of each family write their reasoning
text_reader    reads a text that arrives in pieces
"""
