"""Ollama's API on logitd's engine: its bodies become native `GenerateRequest`s, and their replies
those of Ollama. It computes nothing.
"""
