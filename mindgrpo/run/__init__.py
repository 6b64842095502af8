"""Keeps what a run has besides its steps: output folder, recorder, checkpoints, export, signals, skipped updates.

`preflight.py` reads and checks everything a run is given; `session.py` goes from the first step to the last.
The steps themselves are in grpo/, the files of metrics in monitor/.
"""
