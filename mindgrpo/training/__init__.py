"""Trains a rank's pipeline stage: forward and backward graphs, 1F1B schedule, gradient synchronisation, AdamW.

`policy.py` is the entry and `update.py` makes one optimizer update over chosen samples of a batch.
Formulas of losses are in algorithm/, the decoder and its forward-only pipeline in models/.
"""
