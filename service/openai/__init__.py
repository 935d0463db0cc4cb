"""OpenAI's API on logitd's engine: bodies, and translation in both directions.

A request is translated into a native `GenerateRequest` and handled as /generate does; a native
reply, or chunk of a stream, is translated into OpenAI's format. Nothing is computed here.
"""
