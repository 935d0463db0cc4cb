"""The API of Hugging Face's text-generation-inference (TGI) on logitd's engine: `inputs` and
`parameters` become a native `GenerateRequest`, and its reply one of TGI's. It computes nothing.
"""
