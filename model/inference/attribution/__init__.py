"""Attribution: how much each token and each part of the model contributes to a logit."""
