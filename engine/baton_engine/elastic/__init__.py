"""Expert-parallel groups that change size while they serve.

coordinator/  the group as the coordinator sees it; a process of its own
rank/         the group as a rank sees it
rank_name.py  the form of a rank's name
"""
