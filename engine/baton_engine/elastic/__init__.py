"""Expert-parallel groups that change size while they serve.

coordinator/  the coordinator, a separate process
rank/         the code of a rank: waves, and the connections to the coordinator and other ranks
rank_name.py  the format of a rank's name
"""
