"""An engine core as a rank of an expert-parallel group. A dense engine imports none of this.

dp_engine_core_proc  the process of a rank
dp_engine_core       the step of a rank: exchange votes, run with the others, change generations
control_group        the exchange of votes between the ranks of a generation
standby_generation   a generation that is prepared while another one serves
retired_groups       control groups that are closed after a grace period
rank_report          the rank's status for the coordinator and for metrics
"""
