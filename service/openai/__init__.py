"""OpenAI's API on logitd's engine: bodies, and translation there and back.

A request is translated into a native `GenerateRequest` and takes the way of /generate; a native
reply, or chunk of a stream, is translated into OpenAI's shape. Nothing is computed here.
"""
