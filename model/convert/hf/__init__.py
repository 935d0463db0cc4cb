"""Hugging Face folders: configuration, tokenizer, chat template, and export."""
