"""Model: the GPT, its tokenizer and checkpoint, the engine and the trainer.

Only this package imports torch. It contains nothing about HTTP.
"""
