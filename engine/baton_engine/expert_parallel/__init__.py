"""The engine core of a rank in an expert-parallel group. Dense engines do not import this package.

dp_engine_core_proc  the process of a rank
dp_engine_core       the steps of a rank: exchange votes, run with other ranks, change generations
vote_group           the exchange of votes between the ranks of a generation
standby_generation   the preparation of a generation while another generation serves
retired_groups       vote groups that are closed after a grace period
rank_status          the rank's status for the coordinator and for metrics
"""
