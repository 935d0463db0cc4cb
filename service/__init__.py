"""Everything that talks: the HTTP service, the command line and the Python client.

fastapi, uvicorn and asyncio live below this package and nowhere else; torch does not. Importing
`service` itself imports nothing.
"""
