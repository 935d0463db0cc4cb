"""The GPT itself: its shape, one forward for training and serving, and where its weights lie."""
