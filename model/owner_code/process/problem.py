"""Problem: the error of this program that is meant for the user."""


class Problem(Exception):
    """The model or its logits cannot be computed. The message is for the user."""
