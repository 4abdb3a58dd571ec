"""The search for launch configurations that `tune.py` runs.

selection: times the candidates of one launch and keeps the fastest correct one.
subjects: the launches of every operation, with their shapes and candidates.
"""
