"""Texts that tests of `baton_text` share.

chat_templates  chat templates in the formats of the families of models
"""
