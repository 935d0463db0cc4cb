"""Everything that computes: the GPT, its tokenizer and checkpoint, the engine and the trainer.

torch is imported below this package and nowhere else in the project. Nothing here knows HTTP.
Importing `model` itself imports nothing.
"""
