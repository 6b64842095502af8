"""Makes one GRPO step: sync, rollout, scores, log-probs, advantages, update; and evaluations.

`step.py` runs the phases over `roles.py` (policy, reference, engine) and changes the `State` of a `Run` (`state.py`);
`build.py` is where the configuration becomes components, and `inputs.py` holds data, tokenizer and rewards. Layouts and
sizes are computed in plan/, formulas are in algorithm/, graphs and the optimizer in training/, a run's files in run/.
"""
