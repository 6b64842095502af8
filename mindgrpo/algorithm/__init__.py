"""GRPO as pure arithmetic on host arrays: advantages, packing, losses, schedules. Imports no device."""
