"""Tools that a conversation may call: their schemas, the calls in a model's text, and the processes that run them.

Turns, token ids and the loop are rollout/conversations.py; what a chat template makes of a tool's answer is
data/turns.py.
"""
