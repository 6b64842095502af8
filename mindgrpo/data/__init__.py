"""Turns a user's rows into encoded prompts, in an order that is a function of the seed.

Holds readers of data sets (sources.py opens one), chat templates, the tokenizer, the prompts of a run and their
sampler. Scores of completions are in rewards/, batches of tokens to train on in training/.
"""
