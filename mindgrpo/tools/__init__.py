"""Tools that a conversation may call: their schemas, the calls in a model's text, and the processes that run them.

Turns, token ids and the loop are in rollout/conversations.py; data/turns.py encodes a tool's answer by the chat
template.
"""
