"""One vLLM engine in a process of its own, driven over a socket; imports neither MindSpore nor mindgrpo."""
