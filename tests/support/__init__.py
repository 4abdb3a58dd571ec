"""What several test suites share: the reference model and its tie rule, deadlines, processes."""
