"""Models of any code: tensors recognised by the role that they play, not by the project they are
from.

Names and shapes say what a tensor is (`recognise.py`), settings, flags, the owner's code or a text
say what names cannot (`resolve.py`), and the weights are brought into this project's form without
changing what they compute (`build.py`).
"""
