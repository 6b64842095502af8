"""Trains a rank's pipeline stage: forward and backward graphs, 1F1B schedule, gradient synchronisation, AdamW.

`policy.py` is the entry and `update.py` one optimizer update over chosen samples.
Losses are formulas of algorithm/, the decoder is in models/.
"""
