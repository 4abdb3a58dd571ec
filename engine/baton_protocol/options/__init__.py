"""Configuration of engines and gateways. Each option is declared once, with its flag and bounds.

config          configuration of one engine and of one gateway
option          command-line flags and bounds of configuration fields
engine_options  the options of `baton-engine`, and the checks of their values
arguments       types of command-line arguments
field_comments  comments of the fields of a struct
"""
