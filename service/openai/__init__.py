"""OpenAI's API on logitd's engine: its bodies, and the translation in both directions.

A request becomes a native `GenerateRequest`, handled exactly as by /generate. A native reply, or a
chunk of a stream, is translated into OpenAI's format. This package computes nothing itself.
"""
