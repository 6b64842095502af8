"""A process of the tests that stands in for vLLM's; see __main__.py."""
