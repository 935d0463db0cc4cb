"""Attribution: which tokens and which parts of the model a logit hangs on."""
