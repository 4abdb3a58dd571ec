"""The rendered Helm chart, for the install tests."""
