"""What a run tells: metrics, completions, curve, console. Refuses to steer it."""
