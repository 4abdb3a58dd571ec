"""The code of a rank in an elastic group.

waves.py      the state machine that decides when ranks step together
rank_link.py  the connections to the coordinator and to other ranks
"""
