"""Makes one GRPO step: rollout, scores, log-probs, advantages, update, weight sync; and evaluation.

`step.py` runs the phases, `roles.py` holds policy, reference and generator, `run_plan.py` derives layouts and sizes.
Formulas are in algorithm/, files of a run in run/.
"""
