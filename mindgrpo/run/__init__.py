"""Keeps what a run has besides its steps: output folder, recorder, checkpoints, export, signals, skipped updates.

`preflight.py` reads and checks everything a run is given, `train.py` goes from the first step to the last, and
`resume.py` begins where a checkpoint was saved.
The steps themselves are in grpo/, the files of metrics in monitor/.
"""
