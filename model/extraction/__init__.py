"""Every token of a text through a checkpoint, into files: logprobs, or the values of stages."""
