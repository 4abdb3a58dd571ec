"""Where the experts are: their placement on ranks, and its balance.

expert_placement  the placement of experts on ranks
balance           load of the experts, and when to rebalance
rebalance_steps   the moves with the highest gain, for a rebalance with a limit
"""
