"""Counters, gauges and histograms of an engine, and their export to Prometheus.

engine_stats      gauges and counters of an engine
topology_stats    gauges and counters of a rank of an expert-parallel group
request_metrics   histograms of latencies and numbers of tokens
recent_maximum    the largest value of a recent time window
load_counter      bytes of weights read while the model loads
prometheus        exports the statistics and histograms as Prometheus metrics
"""
