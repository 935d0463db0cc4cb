"""Problem: the error whose message this program reports to the user."""


class Problem(Exception):
    """Raised if the model cannot be created or its logits cannot be computed."""
