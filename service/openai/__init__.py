"""OpenAI's API on logitd's engine: its bodies, and the translation in both directions.

A request becomes a native `GenerateRequest`, which is handled as /generate handles it. A native
reply, or chunk of a stream, is translated into OpenAI's format. Nothing is computed here.
"""
