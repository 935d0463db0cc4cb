"""logitd from Python: a client of a running `logitd serve`.

    from logitd import Client

    with Client() as client:
        print(client.generate("def main():", max_tokens=40).text)

The public names of `service.client`, and nothing else.
"""

from service.client import *  # noqa: F403
