"""Makes one GRPO step: sync, rollout, scores, log-probs, advantages, update; and evaluations.

`step.py` runs the phases over `roles.py` (policy, reference, engine); `build.py` and `settings.py` are where the
configuration becomes components, `run_plan.py` derives layouts and sizes from it.
Formulas are in algorithm/, graphs and optimizer in training/, files of a run in run/.
"""
