"""How prompts and decode steps are computed: plain torch, native CPU code, or CUDA graphs."""
