"""The group as a rank sees it.

waves.py      when ranks step together, as a state machine
rank_link.py  the connections to the coordinator and to other ranks
"""
