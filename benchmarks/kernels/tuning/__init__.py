"""The search for launch configurations, which `tune.py` runs.

selection: times the candidates of one launch and keeps the fastest correct candidate.
subjects: the launches of every operation, with their shapes and candidates.
"""
