"""Makes one GRPO step: sync, rollout, scores, log-probs, advantages, update; and evaluations.

`step.py` runs the phases over `roles.py` (policy, reference, engine); `build.py` and `settings.py` are where the
configuration becomes components. Layouts and sizes are computed in plan/, formulas are in algorithm/, graphs and the
optimizer in training/, a run's files in run/.
"""
